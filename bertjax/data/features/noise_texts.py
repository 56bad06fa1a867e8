# SPDX-License-Identifier: Apache-2.0
"""Texts in the form that operations of data.noise work on (noise_operations.py).

Texts are concatenated in one array of codes: an id, and bits that state what may be
done to the token.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from bertjax.data import counter_rng
from bertjax.data.masking import choose

IDS = (1 << 24) - 1
FREE = 1 << 28  # text that may be chosen, not special and not a mask
BEGINS_UNIT = 1 << 27
FRAME = 1 << 26  # tokens around texts; they keep their places
ENDS_SENTENCE = 1 << 25


class Text(NamedTuple):
    """Concatenated texts: codes i32 [n], and the number of codes per text, i64 [s]."""

    codes: np.ndarray
    size: np.ndarray

    @property
    def owner(self) -> np.ndarray:
        """The number of the text that each token belongs to, i64 [n]."""
        return np.repeat(np.arange(len(self.size)), self.size)


class Corruption(NamedTuple):
    """What operations read: the mask's id, the pieces that are drawn and their
    cumulative shares (None: uniform). They write to `counts` and `drawn`."""

    mask_id: int
    replacements: np.ndarray
    unigram: np.ndarray | None
    counts: Counter[str]
    drawn: list[np.ndarray] | None

    def draw_pieces(self, keys: np.ndarray, slot: np.ndarray) -> np.ndarray:
        """Draw a random piece for each (key, slot): codes i32, marked as text."""
        if self.unigram is None:
            index = counter_rng.below(keys, slot, len(self.replacements))
        else:
            draw = counter_rng.uniform(keys, slot)
            index = np.searchsorted(self.unigram, draw, "right")
        return self.replacements[index] | np.int32(FREE | BEGINS_UNIT)

    def draw_masks(
        self, keys: np.ndarray, slot: np.ndarray, random: float
    ) -> np.ndarray:
        """Return masks, of which a share `random` are random pieces: codes i32."""
        codes = np.full(len(keys), self.mask_id, np.int32)
        if random:
            key = counter_rng.fold(keys, "random")
            own = np.flatnonzero(counter_rng.uniform(key, slot) < random)
            codes[own] = self.draw_pieces(
                counter_rng.fold(keys[own], "replace"), slot[own]
            )
        return codes


class Units(NamedTuple):
    """The units of texts that may be chosen: the first token and the size of each, i64
    [u]; and for each text the number of its first unit and of its units, i64 [s]."""

    first: np.ndarray
    size: np.ndarray
    begin: np.ndarray
    many: np.ndarray


def find_units(text: Text) -> Units:
    """Return the words, or tokens, that may be chosen; none has a special token."""
    free = (text.codes & FREE) > 0
    begins = free & ((text.codes & BEGINS_UNIT) > 0)
    begins[1:] |= free[1:] & ~free[:-1]
    begins[:1] |= free[:1]
    units = choose.find_units(free[None], begins[None])
    until = np.searchsorted(units.first, np.cumsum(text.size))
    many = np.diff(until, prepend=0)
    return Units(units.first, units.size, until - many, many)


def count_share(share: float, total: np.ndarray) -> np.ndarray:
    """Return ceil(share total), i64; 0.1 of 30 is 3 in spite of rounding errors."""
    return np.ceil(share * total - 1e-9).astype(np.int64)
