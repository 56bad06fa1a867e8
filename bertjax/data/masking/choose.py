# SPDX-License-Identifier: Apache-2.0
"""Choose the tokens to predict: single tokens and whole units, exactly to a budget.

Tokens are drawn without replacement: each token gets 64 random bits whose low bits are
replaced by its position, and the smallest values of a row win. ngrams.py chooses
n-grams.
"""

from typing import NamedTuple

import numpy as np

from bertjax.data import counter_rng
from bertjax.data.masking.presets import Masking
from bertjax.data.masking.vocab_tables import Tables
from bertjax.data.ragged import ramps
from bertjax.data.token_flags import BEGINS_ENTITY, BEGINS_WORD, ENTITY, SPECIAL

TOP = np.uint64(1 << 63)
MAX_NOISE = ~np.uint64(0)


class Rows(NamedTuple):
    """Rows of a batch to mask."""

    ids: np.ndarray  # i32 [b, L]
    real: np.ndarray  # i32 [b, L], 1 for a token, 0 for padding
    keys: np.ndarray  # u64 [b], the keys of the random draws (counter_rng.py)
    marks: np.ndarray | None = None  # u8 [b, L] flags, if the store has any


class Chosen(NamedTuple):
    """The tokens to predict: i64 [b, W] columns of the row, ascending; L if unused."""

    column: np.ndarray
    word: np.ndarray  # first column of the unit that each token belongs to
    span: np.ndarray  # first column of the units that were chosen together with it
    weight: np.ndarray | None = None  # f32 [b, W]; None: 1 each
    lengths: np.ndarray | None = None  # i64 [n], span lengths in units; None: 1 each


def is_text(rows: Rows, tables: Tables) -> np.ndarray:
    """Return which tokens are text, not padding or special tokens: bool [b, L].

    ids   [CLS]  the  cat [SEP] [PAD]
    text      0    1    1     0     0
    """
    return ((tables.flags.take(rows.ids) & SPECIAL) == 0) & (rows.real != 0)


def choose_where(where: np.ndarray, most: int) -> Chosen:
    """Choose the first `most` tokens of each row where `where`, bool [b, L], is true.

    where    0 1 1 0 1 0    most = 2
    column     1 2
    """
    where = where & (np.cumsum(where, axis=1) <= most)
    [column] = in_rows([np.flatnonzero(where)], where.shape)
    return Chosen(column, column, column)


class Units(NamedTuple):
    """The units of a block that may be chosen, in order; positions are counted from the
    block's first token."""

    first: np.ndarray  # i64 [U]
    size: np.ndarray  # i64 [U], in tokens
    bounds: np.ndarray  # i64 [b + 1]: the units of row r are bounds[r] : bounds[r + 1]


def eligible(
    rows: Rows, masking: Masking, tables: Tables
) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens may be predicted, and which of them begin a unit.

    Both are bool [b, L]; they are the same array when the unit is the token. A unit
    begins where the table (or the marks) says so, and after a token that may not be
    predicted, so that no unit extends over a special token.
    """
    flags = tables.flags
    if masking.eligible == "unknown":
        flags = flags.copy()
        flags[tables.unk_id] &= ~np.uint8(SPECIAL)
    elif masking.eligible == "all":
        flags = flags & ~np.uint8(SPECIAL)
    flags = flags.take(rows.ids)
    free = (flags & SPECIAL) == 0
    free &= rows.real != 0
    if masking.unit == "token":
        return free, free
    flags = flags if rows.marks is None else rows.marks  # only marks flag entities
    begin = BEGINS_WORD
    if masking.unit == "entity":
        begin = BEGINS_ENTITY
        free &= (flags & ENTITY) != 0
    begins = (flags & begin) != 0
    begins[:, 0] = True
    begins[:, 1:] |= ~free[:, :-1]
    begins &= free
    return free, begins


def budgets(rows: Rows, masking: Masking, most: int) -> np.ndarray:
    """Return the largest number of tokens that each row predicts, i64 [b]."""
    # Counts the real tokens; summing booleans takes three times as long.
    real = np.bitwise_count(np.packbits(rows.real != 0, axis=1)).sum(axis=1)
    share = masking.rate * real
    if masking.count == "stochastic":
        chance = counter_rng.uniform(counter_rng.fold(rows.keys, "count"), 0)
        number = np.floor(share + chance)
    elif masking.count == "round":
        number = np.maximum(1, np.rint(share))  # half to even
    else:
        number = np.maximum(1, np.ceil(share - 1e-9))  # 0.15 * 20 is above 3 in floats
    return np.minimum(most, number).astype(np.int64)


def low_bits(length: int) -> np.uint64:
    """Return the mask of the bits that hold a position below `length`."""
    return np.uint64((1 << (length - 1).bit_length()) - 1)


def draw_noise(
    keys: np.ndarray, length: int, patience: np.ndarray | None = None
) -> np.ndarray:
    """Draw the order in which the tokens of a row are chosen, smallest first: u64
    [b, L] below 2^63, with the position in the low bits.

    `patience` f64 [b, L] is 1 / weight of each token. Given it, -log(U) * patience is
    the time at which a token is drawn; ordering tokens by these times is weighted
    sampling without replacement (Efraimidis and Spirakis 2006). Positive floats sort as
    their bits do.
    """
    column = np.arange(length, dtype=np.uint64)
    noise = counter_rng.bits(counter_rng.fold(keys, "choose")[:, None], column)
    if patience is not None:
        time = np.log(((noise >> 11).astype(np.float64) + 0.5) * 2.0**-53)
        time *= -patience
        noise = time.view(np.uint64)
    noise &= (TOP - 1) ^ low_bits(length)
    noise |= column
    return noise


def choose_tokens(noise: np.ndarray, free: np.ndarray, budget: np.ndarray) -> Chosen:
    """Choose the `budget` free tokens with the smallest noise."""
    length = noise.shape[1]
    np.putmask(noise, ~free, MAX_NOISE)
    most = min(int(budget.max(initial=0)), length)
    if most < length:
        noise = np.partition(noise, most, axis=1)[:, :most]
    noise.sort(axis=1)
    unused = (np.arange(most) >= budget[:, None]) | (noise >= TOP)
    column = (noise & low_bits(length)).astype(np.int64)
    column[unused] = length
    column.sort(axis=1)
    return Chosen(column, column, column)


def choose_subsets(
    keys: np.ndarray, total: np.ndarray, number: np.ndarray
) -> np.ndarray:
    """Choose `number` of `total` items under each key; every subset is equally likely.

    keys u64 [g]; total, number i64 [g], number <= total. Returns the chosen items,
    numbered from 0, i64 [sum of number]: ascending within a key, key after key.

    Worked example: keys [a, b], total [3, 5], number [2, 1] may return items 0 and 2 of
    a and item 4 of b: [0, 2, 4].
    """
    out = np.empty(int(number.sum()), np.int64)
    first = np.cumsum(number) - number
    # Totals of the same bit width are drawn together; the items that a key chooses
    # depend on its own total alone.
    width = np.ceil(np.log2(np.maximum(total, 1))).astype(np.int64)
    for bits in np.unique(width[number > 0]).tolist():
        own = np.flatnonzero((width == bits) & (number > 0))
        column = np.arange(int(total[own].max()), dtype=np.uint64)
        noise = counter_rng.bits(keys[own, None], column)
        noise &= (TOP - 1) ^ low_bits(1 << bits)
        noise |= column
        chosen = choose_tokens(noise, column < total[own, None], number[own]).column
        used = np.arange(chosen.shape[1]) < number[own, None]
        slot = first[own, None] + np.arange(chosen.shape[1])
        out[slot[used]] = chosen[used]
    return out


def choose_repeatedly(keys: np.ndarray, free: np.ndarray, budget: np.ndarray) -> Chosen:
    """Draw `budget` free tokens with replacement; weights count how often each came."""
    b, length = free.shape
    where = np.flatnonzero(free)
    bounds = np.searchsorted(where, np.arange(b + 1) * length)
    slot = np.arange(int(budget.max(initial=0)))
    n = np.diff(bounds)[:, None]
    drawn = counter_rng.below(
        counter_rng.fold(keys, "choose")[:, None], slot, np.maximum(n, 1)
    )
    used = (slot < budget[:, None]) & (n > 0)
    token, times = np.unique(
        where[(bounds[:-1, None] + drawn)[used]], return_counts=True
    )
    [column] = in_rows([token], (b, length))
    weight = np.zeros(column.shape, np.float32)
    weight[column < length] = times
    return Chosen(column, column, column, weight)


def find_units(free: np.ndarray, begins: np.ndarray) -> Units:
    """Return the units of a block."""
    b, length = free.shape
    first = np.flatnonzero(begins)
    last = free.reshape(-1).copy()
    last[:-1] &= ~(free & ~begins).reshape(-1)[1:]  # the same unit does not continue
    bounds = np.searchsorted(first, np.arange(b + 1) * length)
    return Units(first, np.flatnonzero(last) - first + 1, bounds)


def choose_units(
    noise: np.ndarray, units: Units, candidate: np.ndarray, budget: np.ndarray
) -> np.ndarray:
    """Return the chosen units, ascending.

    `candidate` bool [b, L] is true where a unit begins that may be chosen. The units of
    a row are visited in the order of their noise; each is chosen if it fits in the rest
    of the budget.
    """
    b, length = noise.shape
    size_at = np.zeros(b * length, np.int64)
    size_at[units.first] = units.size
    order = candidate.astype(np.uint64)
    order -= 1  # all bits where no candidate is
    order |= noise
    order.sort(axis=1)
    chosen = [np.zeros(0, np.int64)]
    todo, width = np.arange(b), int(budget.max(initial=0)) + 8
    while todo.size:
        ahead = order[todo, :width]
        is_unit = ahead < TOP
        at = (ahead & low_bits(length)).astype(np.int64)
        at *= is_unit
        at += todo[:, None] * length
        size = size_at.take(at) * is_unit
        taken = take_in_order(size, budget[todo])
        # Nearly all rows are full by now; the others look at all of their units.
        short = (size * taken).sum(axis=1) < budget[todo]
        short &= is_unit[:, -1] & (width < length)
        chosen.append(at[taken & ~short[:, None]])
        todo, width = todo[short], length
    return np.searchsorted(units.first, np.sort(np.concatenate(chosen)))


def take_in_order(size: np.ndarray, budget: np.ndarray) -> np.ndarray:
    """Return which sizes [b, W] a row takes from its budget, in order; 0 is no unit.

    Works in rounds: take units up to the first that does not fit; drop every unit that
    no longer fits, since the rest of the budget only shrinks; repeat. A few rounds are
    enough.
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


def all_tokens(
    units: Units, unit: np.ndarray, span: np.ndarray | None, shape: tuple[int, int]
) -> Chosen:
    """Return the tokens of these units (ascending) of a block [b, L]. `span` says where
    the span of each unit begins, counted from the block's first token; None means that
    each unit is its own span."""
    first, size = units.first.take(unit), units.size.take(unit)
    token = np.repeat(first, size)
    values = [token + ramps(size), token]
    if span is not None:
        values.append(np.repeat(span, size))
    column, word, *rest = in_rows(values, shape)
    return Chosen(column, word, rest[0] if rest else word)


def in_rows(values: list[np.ndarray], shape: tuple[int, int]) -> list[np.ndarray]:
    """Convert positions in a block [b, L] to columns of its rows: i64 [b, W].

    values: i64 [n] each, counted from the block's first token; the first array ascends
    and decides the row for all of them. W is the largest number in any row; L fills the
    unused slots.
    """
    b, length = shape
    base = np.arange(b + 1) * length
    number = np.diff(np.searchsorted(values[0], base))
    used = np.arange(number.max(initial=0)) < number[:, None]
    slots, begin = np.flatnonzero(used), np.repeat(base[:-1], number)
    out = [np.full(used.shape, length, np.int64) for _ in values]
    for columns, value in zip(out, values, strict=True):
        columns.reshape(-1)[slots] = value - begin
    return out
