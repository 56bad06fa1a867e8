# SPDX-License-Identifier: Apache-2.0
"""Choose the tokens to predict and corrupt them, whole batches at a time.

The exact number of positions is drawn without replacement: each token gets 64 bits of
noise whose low bits are replaced by its position, and the smallest of a row win. The
three official maskers differ from each other and from their papers; each difference is
a field of `Masking`, and a preset is a value of it.
"""

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.data import counter
from bertjax.registry import pick

_TOP = np.uint64(1 << 63)
_BLOCK = 1 << 16  # tokens masked at a time, so that the noise stays in the cache


@dataclass(frozen=True)
class Masking:
    """How positions are chosen and corrupted.

    rate: share of a row's tokens, special ones included, that is predicted.
    unit: "token", or "word" (whole words in shuffled order; a word that would overflow
        the remaining budget is skipped).
    count: "round" (BERT: min(P, max(1, round(rate * tokens)))) or "stochastic"
        (RoBERTa: floor(rate * tokens + U) with U uniform in [0, 1)).
    mask_share, random_share: shares of the predicted that become the mask token or a
        random token; the rest is kept.
    replacement: "uniform" or "unigram" (as often as in the training text).
    per_piece: with words, each piece draws its own outcome (BERT), or one a word.
    eligible: what may be predicted: "text" (nothing special), "unknown" (text and the
        unknown token) or "all" (every real token).
    random_from: what a random token is drawn from: "text" or "vocabulary" (all ids).
    """

    rate: float = 0.15
    unit: str = "token"
    count: str = "round"
    mask_share: float = 0.8
    random_share: float = 0.1
    replacement: str = "uniform"
    per_piece: bool = True
    eligible: str = "text"
    random_from: str = "text"


UNITS = ("token", "word")
REPLACEMENTS = ("uniform", "unigram")
PRESETS = {
    # google-research/bert, create_pretraining_data.py
    "bert": Masking(),
    # fairseq, data/mask_tokens_dataset.py: one outcome for a whole word
    "roberta": Masking(count="stochastic", per_piece=False),
}
# What the official code does and the project does not unless asked: see `Masking`.
PAPER_COMPAT = {
    "bert": {"eligible": "unknown", "random_from": "vocabulary"},
    "roberta": {"eligible": "all"},
}


def make_masking(
    preset: str,
    *,
    rate: float | None = None,
    unit: str | None = None,
    replacement: str | None = None,
    paper_compat: bool = False,
) -> Masking:
    """Make a masking from a preset and what the config refines; None keeps the preset.

    Raises UserError for names that nothing carries and for a rate outside (0, 1].

    >>> make_masking("bert", rate=0.4).rate
    0.4
    """
    masking = pick("data.masking", preset, PRESETS)
    changes: dict[str, Any] = dict(PAPER_COMPAT[preset]) if paper_compat else {}
    if rate is not None:
        if not 0 < rate <= 1:
            raise UserError(f"data.mask_rate={rate} must be above 0 and at most 1")
        changes["rate"] = rate
    if unit is not None:
        changes["unit"] = pick("data.mask_unit", unit, {u: u for u in UNITS})
    if replacement is not None:
        known = {r: r for r in REPLACEMENTS}
        changes["replacement"] = pick("data.replacement", replacement, known)
    return dataclasses.replace(masking, **changes)


def predictions_per_sequence(rate: float, length: int) -> int:
    """Return P = ceil(rate * length), the rate taken as the decimal it is written as.

    >>> predictions_per_sequence(0.15, 128), predictions_per_sequence(0.07, 100)
    (20, 7)
    """
    return math.ceil(Fraction(repr(float(rate))) * length)


@dataclass(frozen=True, eq=False)
class Tables:
    """What masking knows of a vocabulary of V ids, indexed by id."""

    mask_id: int
    unk_id: int
    is_special: np.ndarray  # bool [V]: never masked, never drawn
    word_starts: np.ndarray  # bool [V]: begins a word
    replacement_ids: np.ndarray  # i32 [n], what random tokens are drawn from
    unigram: np.ndarray | None  # f64 [n], cumulative shares of replacement_ids

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.is_special)


def make_tables(tokenizer: Any, counts: np.ndarray | None = None) -> Tables:
    """Make the tables of a tokenizer; `counts` [V] are needed for unigram replacement.

    The tokenizer has vocab_size, mask_id, unk_id, special_ids, word_starts and
    replacement_ids. Counts that are all zero give no unigram table.
    """
    is_special = np.zeros(tokenizer.vocab_size, bool)
    is_special[tokenizer.special_ids] = True
    drawn = np.asarray(tokenizer.replacement_ids, np.int32)
    unigram = None
    if counts is not None and (total := counts[drawn].sum()) > 0:
        unigram = np.cumsum(counts[drawn]) / total
    starts = np.asarray(tokenizer.word_starts, bool)
    return Tables(
        tokenizer.mask_id, tokenizer.unk_id, is_special, starts, drawn, unigram
    )


class Masked(NamedTuple):
    """The corrupted ids i32 [b, L], and where, what and whether to predict [b, P]."""

    input_ids: np.ndarray
    mlm_positions: np.ndarray
    mlm_ids: np.ndarray
    mlm_weights: np.ndarray


def mask_tokens(
    input_ids: np.ndarray,
    attention_mask: np.ndarray,
    keys: np.ndarray,
    masking: Masking,
    tables: Tables,
    P: int,
) -> Masked:
    """Choose and corrupt; input_ids, attention_mask i32 [b, L], keys u64 [b].

    A row's result depends on its own tokens and key alone. Returns new input_ids
    i32 [b, L], mlm_positions and mlm_ids i32 [b, P], mlm_weights f32 [b, P]; positions
    ascend, unused slots hold position 0, id 0 and weight 0. Raises IndexError for an id
    outside the vocabulary. Sources: Devlin et al. 2019, section 3.1 and appendix A.1;
    Liu et al. 2019, section 4.1; google-research/bert's README for whole words.

    Worked example (one row, 2 = cls, 3 = sep, 4 = mask, 0 = pad, rate 0.3, P = 3):
    input_ids [2 17 25 31 46 3 0 0], of which 6 are real: round(0.3 * 6) = 2 positions.
    Positions 2 and 4 win; 2 draws "mask" and 4 draws "random":
    input_ids' [2 17 4 31 88 3 0 0], mlm_positions [2 4 0], mlm_ids [25 46 0],
    mlm_weights [1 1 0].
    """
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
        _mask_block(
            Masked(*(a[part] for a in out)), attention_mask[part], keys[part], masking,
            tables,
        )  # fmt: skip
    return out


def _mask_block(
    out: Masked, real: np.ndarray, keys: np.ndarray, masking: Masking, tables: Tables
) -> None:
    """Mask the rows of `out`, whose input_ids are still the originals, in place."""
    ids, (b, length) = out.input_ids, out.input_ids.shape
    blocked = _blocked(ids, real, masking, tables)
    budget = _budget(real, keys, masking, out.mlm_ids.shape[1])
    noise = counter.bits(counter.fold(keys, "choose")[:, None], np.arange(length))
    noise &= np.uint64((1 << 63) - (1 << (length - 1).bit_length()))
    noise |= np.arange(length, dtype=np.uint64)
    if masking.unit == "word":
        begins = tables.word_starts.take(ids)
        begins[:, 0] = True
        begins[:, 1:] |= blocked[:, :-1] != 0
        row, column, word = _choose_words(noise, blocked, begins, budget)
    else:
        row, column = _choose_tokens(noise, blocked, budget)
        word = column
    slot = np.arange(row.size) - np.searchsorted(row, np.arange(b))[row]
    chosen = ids[row, column]
    out.mlm_positions[row, slot] = column
    out.mlm_ids[row, slot] = chosen
    out.mlm_weights[row, slot] = 1
    address = column if masking.per_piece else word
    draws = counter.uniform(counter.fold(keys, "outcome")[row], address)
    ids[row, column] = np.where(draws < masking.mask_share, tables.mask_id, chosen)
    swap = (draws >= masking.mask_share) & (
        draws < masking.mask_share + masking.random_share
    )
    row, column = row[swap], column[swap]
    key = counter.fold(keys, "replace")[row]
    ids[row, column] = _replacements(key, column, masking, tables)


def _blocked(
    ids: np.ndarray, real: np.ndarray, masking: Masking, tables: Tables
) -> np.ndarray:
    """Return u64 [b, L], the top bit set where a token may not be predicted."""
    never = np.where(tables.is_special, _TOP, np.uint64(0))
    if masking.eligible == "unknown":
        never[tables.unk_id] = 0
    elif masking.eligible == "all":
        never[:] = 0
    blocked = never.take(ids)
    blocked[real == 0] = _TOP
    return blocked


def _budget(
    real: np.ndarray, keys: np.ndarray, masking: Masking, most: int
) -> np.ndarray:
    """Return how many tokens each row predicts at most, i64 [b]."""
    share = masking.rate * real.sum(axis=1)
    if masking.count == "round":
        number = np.maximum(1, np.rint(share))  # half to even, as Python's round
    else:
        number = np.floor(share + counter.uniform(counter.fold(keys, "count"), 0))
    return np.minimum(most, number).astype(np.int64)


def _choose_tokens(
    noise: np.ndarray, blocked: np.ndarray, budget: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and columns of the `budget` smallest free tokens, ascending."""
    length = noise.shape[1]
    noise |= blocked
    most = min(int(budget.max(initial=0)), length)
    if most < length:
        noise = np.partition(noise, most, axis=1)[:, :most]
    noise.sort(axis=1)
    unused = (np.arange(most) >= budget[:, None]) | (noise >= _TOP)
    columns = (noise & np.uint64((1 << (length - 1).bit_length()) - 1)).astype(np.int64)
    columns[unused] = length
    columns.sort(axis=1)
    row, slot = np.nonzero(columns < length)
    return row, columns[row, slot]


def _choose_words(
    noise: np.ndarray, blocked: np.ndarray, begins: np.ndarray, budget: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows and columns of the pieces of whole words, and where the words begin.

    Going through the words in the order of their noise, a word is taken if it fits in
    what is left.
    """
    b, length = noise.shape
    edges = np.flatnonzero(begins | (blocked != 0))  # column 0 always is one
    sizes = np.zeros(b * length, np.int64)
    sizes[edges] = np.diff(edges, append=b * length)
    noise |= blocked
    noise[~begins] = ~np.uint64(0)
    noise.sort(axis=1)
    chosen = []
    todo, width = np.arange(b), 2 * int(budget.max(initial=0)) + 8
    while todo.size:
        order = noise[todo, :width]
        first = (order & np.uint64((1 << (length - 1).bit_length()) - 1)).astype(int)
        first[order >= _TOP] = 0
        first += todo[:, None] * length
        size = np.where(order < _TOP, sizes[first], 0)
        taken = _take_in_order(size, budget[todo])
        # nearly all rows are full by now; the others look at all of their words
        short = (size * taken).sum(axis=1) < budget[todo]
        short &= (order[:, -1] < _TOP) & (width < length)
        chosen.append(first[taken & ~short[:, None]])
        todo, width = todo[short], length
    start = np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, int)
    size = sizes[start]
    word = np.repeat(start, size)
    piece = np.arange(word.size) - np.repeat(np.cumsum(size) - size, size)
    row, column = np.divmod(word + piece, length)
    return row, column, word % length


def _take_in_order(size: np.ndarray, budget: np.ndarray) -> np.ndarray:
    """Say which sizes [b, W] a row takes from its budget, in order; 0 is no word.

    In rounds: take words up to the first that does not fit; strike out every word
    that no longer fits, since what is left only shrinks; repeat. A few rounds do.
    """
    size = size * (size <= budget[:, None])
    taken = np.zeros(size.shape, bool)
    todo = np.arange(len(size))
    while todo.size:
        left = budget[todo]
        total = np.cumsum(size, axis=1)
        fits = (total <= left[:, None]) & (size > 0)
        taken[todo] = fits
        left = left - (size * fits).sum(axis=1)
        size = size * (fits | (size <= left[:, None]))
        more = ((size > 0) & ~fits).any(axis=1)
        todo, size = todo[more], size[more]
    return taken


def _replacements(
    key: np.ndarray, slot: np.ndarray, masking: Masking, tables: Tables
) -> np.ndarray:
    """Draw random tokens, i32 [n]."""
    if masking.replacement == "unigram":
        if tables.unigram is None:
            raise UserError("data.replacement='unigram' needs the counts of a text")
        index = np.searchsorted(tables.unigram, counter.uniform(key, slot), "right")
        return tables.replacement_ids[index]
    if masking.random_from == "vocabulary":
        return counter.below(key, slot, tables.vocab_size).astype(np.int32)
    return tables.replacement_ids[counter.below(key, slot, len(tables.replacement_ids))]
