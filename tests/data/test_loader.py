# SPDX-License-Identifier: Apache-2.0
"""Batches come in the order of their steps, from either engine."""

import numpy as np
import pytest

from bertjax.data import loader


def make(step):
    """Return batches of two phases with different arrays, shapes and dtypes."""
    if step < 13:
        return {"input_ids": np.full((4, 8), step, np.int32), "a": np.ones(4)}
    return {"input_ids": np.full((2, 16), step, np.int32), "b": np.zeros(2, np.int64)}


@pytest.mark.parametrize("engine", [loader._tf_data, loader.ENGINES["python"]])
def test_a_phase_may_have_arrays_of_its_own(engine):
    seen = list(engine(make, 10, 17))
    assert len(seen) == 7
    for step, batch in enumerate(seen, 10):
        wanted = make(step)
        assert batch.keys() == wanted.keys()
        for name, values in wanted.items():
            assert batch[name].dtype == values.dtype
            np.testing.assert_array_equal(batch[name], values)


def test_an_error_of_a_batch_is_raised_as_it_is():
    def fails(step):
        if step == 3:
            raise ValueError("no such row")
        return make(step)

    batches = loader._tf_data(fails, 0, 9)
    assert [int(next(batches)["input_ids"][0, 0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no such row"):
        list(batches)
