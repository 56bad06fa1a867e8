# SPDX-License-Identifier: Apache-2.0
"""Swap the words of word pairs in half of the rows: data.swap.

Counterfactual data substitution (Hall Maudslay et al. 2019, arXiv 1909.00871, section
3.1): each text appears with its own words or with their counterparts, with probability
1/2 each, so that the amount of text does not grow. Rows are masked after the swap.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bertjax.data import counter_rng
from bertjax.data.masking import choose
from bertjax.data.masking.choose import Rows
from bertjax.data.masking.presets import Masking
from bertjax.data.masking.similar_words import (
    UNFIT,
    Similar,
    ids_within_sentences,
    make_similar,
    why_unfit,
)
from bertjax.data.masking.vocab_tables import Tables
from bertjax.data.ragged import ramps

RATE = 0.5
_WORDS = Masking(unit="word")


def make_pair_table(forms: Mapping[str, str], tokenizer: Any) -> Similar:
    """Create the table that maps the ids of written words to those of their partners.

    Pairs whose words differ in their number of pieces, or have unknown pieces, are left
    out and counted in `skipped`.
    """
    ids = dict(zip(forms, ids_within_sentences([*forms], tokenizer), strict=True))
    special = set(map(int, tokenizer.special_ids))
    words: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    skipped = dict.fromkeys(UNFIT, 0)
    for one, two in forms.items():
        a, b = ids[one], ids[two]
        known = a and special.isdisjoint(a)
        if why := why_unfit(a, b, special) if known else "unknown":
            skipped[why] += 1
        else:
            words.setdefault(a, [b])
    kept = {a: [b] for a, [b] in words.items() if words.get(b) == [a]}
    return replace(make_similar(kept), skipped=skipped)


def swap_words(rows: Rows, tables: Tables, which: np.ndarray) -> np.ndarray:
    """Return ids i32 [b, L] in which the words of tables.pairs are swapped.

    which: bool [b], the rows to change. Only whole words within a row are swapped;
    special tokens stay, and rows keep their length. A second swap restores the ids.

    Worked example: he is 7, she is 9, which is [1, 0]:

        ids    2 7 11 9 3    2 7 11 3
        out    2 9 11 7 3    2 7 11 3
    """
    free, begins = choose.eligible(rows, _WORDS, tables)
    units = choose.find_units(free & which[:, None], begins & which[:, None])
    out = rows.ids.copy()
    flat = out.reshape(-1)
    token = np.repeat(units.first, units.size) + ramps(units.size)
    first, draws = np.cumsum(units.size) - units.size, np.zeros(len(units.first))
    keys = draws.astype(np.uint64)
    new = tables.pairs.draw(flat[token], first, units.size, keys, keys)
    flat[token] = np.where(new >= 0, new, flat[token])
    return out


def draw_rows(keys: np.ndarray) -> np.ndarray:
    """Draw the rows whose words are swapped, bool [b], from their keys u64 [b]."""
    return counter_rng.uniform(counter_rng.fold(keys, "swap"), 0) < RATE
