# SPDX-License-Identifier: Apache-2.0
"""What masking needs to know about a vocabulary, as arrays indexed by id."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from bertjax.data.masking.similar_words import Similar
from bertjax.data.token_flags import BEGINS_WORD, SPECIAL

RARITY = 0.7  # DistilBERT's mlm_smoothing


@dataclass(frozen=True, eq=False)
class Tables:
    """What masking needs to know about a vocabulary of V ids."""

    mask_id: int
    unk_id: int
    flags: np.ndarray  # u8 [V], bits: SPECIAL, BEGINS_WORD
    replacement_ids: np.ndarray  # i32 [n], the ids of random tokens
    unigram: np.ndarray | None  # f64 [n], cumulative shares of replacement_ids
    # f64 [V], 1 / weight, or count^0.7: a smaller value is chosen sooner
    patience: np.ndarray | None
    similar: Similar | None
    pairs: Similar | None = None  # word pairs to swap: each word has one partner

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.flags)


def make_tables(
    tokenizer: Any,
    counts: np.ndarray | None = None,
    similar: Similar | None = None,
    weights: np.ndarray | None = None,
    pairs: Similar | None = None,
) -> Tables:
    """Create the tables of a tokenizer.

    The tokenizer has vocab_size, mask_id, unk_id, special_ids, word_starts and
    replacement_ids. `counts` [V] of the training text are needed for unigram
    replacement and for rare tokens; counts that are all zero are ignored. `weights` f64
    [V] are those of data.mask_weights; `pairs` those of data.swap.
    """
    flags = np.zeros(tokenizer.vocab_size, np.uint8)
    flags[np.asarray(tokenizer.word_starts, bool)] = BEGINS_WORD
    flags[tokenizer.special_ids] |= SPECIAL
    drawn = np.asarray(tokenizer.replacement_ids, np.int32)
    unigram = patience = None
    if counts is not None and (total := counts[drawn].sum()) > 0:
        unigram = np.cumsum(counts[drawn]) / total
        patience = np.maximum(counts, 1) ** RARITY
    if weights is not None:
        patience = 1 / weights
    return Tables(
        tokenizer.mask_id,
        tokenizer.unk_id,
        flags,
        drawn,
        unigram,
        patience,
        similar,
        pairs,
    )
