# SPDX-License-Identifier: Apache-2.0
"""The lengths to which rows of a batch are padded."""

import numpy as np
import pytest

from bertjax.inference.forward import plan_batches

ENDLESS = 2**24  # max_length of T5, which has relative positions


@pytest.mark.parametrize("size", [9, 40, 900, 3000, 8193, 20_000, 100_000])
def test_models_of_any_length_pad_a_few_rows_by_what_they_are(size):
    """Formerly they were padded to 862 or 23,171 tokens, as if rows had up to 2^24."""
    for sizes in ([size], [size, 7, 3]):
        (_, length), *_ = plan_batches(np.array(sizes), 32, ENDLESS)[1]
        assert size <= length <= max(32, 5 * size)


def test_models_of_some_length_pad_a_few_rows_to_their_own_lengths():
    lengths = [
        plan_batches(np.array([size]), 32, 512)[1][0][1] for size in (9, 40, 300, 512)
    ]
    assert lengths == [32, 64, 512, 512]
    assert plan_batches(np.array([100]), 32, 8192)[1][0][1] == 128
