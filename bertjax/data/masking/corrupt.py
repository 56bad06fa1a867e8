# SPDX-License-Identifier: Apache-2.0
"""Corrupt the chosen tokens: mask, random token, similar word, or kept as they are."""

import numpy as np

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.masking.choose import Chosen, Rows
from bertjax.data.masking.presets import Masking
from bertjax.data.masking.vocab_tables import Tables


def corrupt(
    truth: np.ndarray, chosen: Chosen, rows: Rows, masking: Masking, tables: Tables
) -> np.ndarray:
    """Return what stands in place of the chosen tokens `truth`, i32 [b, W].

    What it returns where nothing is chosen is of no matter.
    """
    keys, used = rows.keys, chosen.column < rows.ids.shape[1]
    together = {"piece": chosen.column, "word": chosen.word, "span": chosen.span}
    draws = counter_rng.uniform(
        counter_rng.fold(keys, "outcome")[:, None], together[masking.outcome]
    )
    masked = draws < masking.mask_share
    swap = draws < masking.mask_share + masking.random_share
    swap &= used
    if masking.similar:
        new, replaced = _similar_words(truth, used & masked, chosen, keys, tables)
        swap &= ~replaced
    else:
        new = np.where(masked, tables.mask_id, truth)
        swap &= ~masked
    row, slot = np.nonzero(swap)
    key, column = counter_rng.fold(keys, "replace")[row], chosen.column[row, slot]
    if masking.replacement == "unigram":
        if tables.unigram is None:
            raise UserError("data.replacement='unigram' needs the counts of a text")
        draw = counter_rng.uniform(key, column)
        index = np.searchsorted(tables.unigram, draw, "right")
    elif masking.random_from == "vocabulary":
        new[row, slot] = counter_rng.below(key, column, tables.vocab_size)
        return new
    else:
        index = counter_rng.below(key, column, len(tables.replacement_ids))
    new[row, slot] = tables.replacement_ids[index]
    return new


def _similar_words(
    truth: np.ndarray,
    where: np.ndarray,
    chosen: Chosen,
    keys: np.ndarray,
    tables: Tables,
) -> tuple[np.ndarray, np.ndarray]:
    """Put similar words in place of the tokens of whole words `where`, bool [b, W].

    Returns the new ids, and where a similar word stands now, bool [b, W].
    """
    if tables.similar is None:
        raise UserError("data.masking='macbert' needs data.similar, a table of words")
    new, replaced = truth.copy(), np.zeros(truth.shape, bool)
    row, slot = np.nonzero(where)
    column, word = chosen.column[row, slot], chosen.word[row, slot]
    first = np.flatnonzero(column == word)
    size = np.diff(first, append=len(word))
    key = counter_rng.fold(keys, "similar")[row[first]]
    similar = tables.similar.draw(truth[row, slot], first, size, key, word[first])
    hit = similar >= 0
    row, slot = row[hit], slot[hit]
    new[row, slot], replaced[row, slot] = similar[hit], True
    return new, replaced
