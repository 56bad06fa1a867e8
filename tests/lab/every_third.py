# SPDX-License-Identifier: Apache-2.0
"""A masker from outside the package: every third token of text becomes [MASK]."""

import numpy as np

from bertjax.data.masking.choose import choose_where, is_text
from bertjax.data.masking.masker import Masker


class EveryThird(Masker):
    rate = 1 / 3

    def choose(self, rows, tables, P):
        text = is_text(rows, tables)
        return choose_where(text & (np.cumsum(text, axis=1) % 3 == 0), P)

    def corrupt(self, truth, chosen, rows, tables):
        return np.full_like(truth, tables.mask_id)


def make_masker():
    return EveryThird()
