# SPDX-License-Identifier: Apache-2.0
"""Choose the tokens to predict and corrupt them, whole batches at a time.

What is chosen and how it is corrupted are independent of each other: schemes.py names
the choices and the published combinations, choose.py and ngrams.py choose, corrupt.py
and similar.py corrupt. Every draw has an address (counter.py), so that a row's result
depends on its own tokens and key alone.
"""

import numpy as np

from bertjax import UserError
from bertjax.data.masking import choose
from bertjax.data.masking.corrupt import Masked, corrupt
from bertjax.data.masking.ngrams import choose_ngrams
from bertjax.data.masking.presets import (
    PRESETS,
    UNITS,
    Masking,
    make_masking,
    predictions_per_sequence,
)
from bertjax.data.masking.similar_words import Similar, read_similar
from bertjax.data.masking.vocab_tables import Tables, make_tables

__all__ = [
    "PRESETS", "UNITS", "Masked", "Masking", "Similar", "Tables", "make_masking",
    "make_tables", "mask_tokens", "predictions_per_sequence", "read_similar",
]  # fmt: skip

_BLOCK = 1 << 17  # tokens masked at a time: bounds the memory, and the cache keeps up
# glibc gives freed memory back to the system page by page, which costs as much as all
# of the masking, until a larger piece was freed once. This one is never touched.
_ = np.empty(1 << 24, np.uint8)
del _


def mask_tokens(
    input_ids: np.ndarray,
    attention_mask: np.ndarray,
    keys: np.ndarray,
    masking: Masking,
    tables: Tables,
    P: int,
    marks: np.ndarray | None = None,
    drawn: list[np.ndarray] | None = None,
) -> Masked:
    """Choose and corrupt; input_ids, attention_mask i32 [b, L], keys u64 [b].

    A row's result depends on its own tokens and key alone. Returns new input_ids
    i32 [b, L], mlm_positions and mlm_ids i32 [b, P], mlm_weights f32 [b, P]; positions
    ascend, unused slots hold position 0, id 0 and weight 0. A row never predicts more
    than its budget; tokens meet it exactly, words and n-grams as nearly as they fit.

    Args:
      marks: u8 [b, L] of a store that has them: bit 1 begins a word (in place of the
        vocabulary's table), 2 is part of an entity, 4 begins one.
      drawn: receives i64 arrays, the lengths in units of all that was chosen; of
        n-grams the drawn lengths (`ngrams.choose_ngrams`).

    Raises IndexError for an id outside the vocabulary; UserError where `tables` lack
    the counts or similar words that the masking needs.

    Sources: Devlin et al. 2019, section 3.1 and appendix A.1; Liu et al. 2019, section
    4.1; google-research/bert's README for whole words; Lan et al. 2020, section 4.1;
    Joshi et al. 2020, section 3.1; Cui et al. 2020, section 3.1.

    Worked example (one row, 2 = cls, 3 = sep, 4 = mask, 0 = pad, rate 0.3, P = 3):
    input_ids [2 17 25 31 46 3 0 0], of which 6 are real: round(0.3 * 6) = 2 positions.
    Positions 2 and 4 win; 2 draws "mask" and 4 draws "random":
    input_ids' [2 17 4 31 88 3 0 0], mlm_positions [2 4 0], mlm_ids [25 46 0],
    mlm_weights [1 1 0].
    """
    if masking.weights == "rare" and tables.patience is None:
        raise UserError("data.masking='distilbert' needs the counts of a text")
    b, length = input_ids.shape
    out = Masked(
        input_ids.astype(np.int32),
        np.zeros((b, P), np.int32),
        np.zeros((b, P), np.int32),
        np.zeros((b, P), np.float32),
    )
    step = max(1, _BLOCK // length)
    for low in range(0, b, step):
        part = slice(low, low + step)
        block = Masked(*(a[part] for a in out))
        chosen = _choose(
            block.input_ids, attention_mask[part], keys[part], masking, tables, P,
            None if marks is None else marks[part], drawn,
        )  # fmt: skip
        corrupt(block, chosen, keys[part], masking, tables)
    return out


def _choose(
    ids: np.ndarray,
    real: np.ndarray,
    keys: np.ndarray,
    masking: Masking,
    tables: Tables,
    P: int,
    marks: np.ndarray | None,
    drawn: list[np.ndarray] | None,
) -> choose.Chosen:
    """Choose what the rows predict."""
    free, begins = choose.eligible(ids, real, marks, masking, tables)
    budget = choose.budgets(real, keys, masking, P)
    if masking.repeats:
        chosen = choose.choose_repeatedly(keys, free, budget)
    elif len(masking.lengths) > 1:
        units = choose.find_units(free, begins)
        return choose_ngrams(keys, units, begins, budget, masking.lengths, drawn)
    else:
        rare = masking.weights == "rare"
        patience = tables.patience.take(ids) if rare else None
        noise = choose.draw_noise(keys, ids.shape[1], patience)
        if masking.unit == "token":
            chosen = choose.choose_tokens(noise, free, budget)
        else:
            units = choose.find_units(free, begins)
            unit = choose.choose_units(noise, units, begins, budget)
            chosen = choose.all_tokens(units, unit, None, ids.shape)
    if drawn is not None:
        begun = (chosen.column == chosen.word) & (chosen.column < ids.shape[1])
        drawn.append(np.ones(begun.sum(), np.int64))
    return chosen
