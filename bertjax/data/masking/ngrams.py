# SPDX-License-Identifier: Apache-2.0
"""Choose n-grams: runs of neighboring units whose lengths follow a distribution.

Official code draws a place, then a length, and tries again if the n-gram overlaps
another, so that long n-grams are rejected more often and the lengths drift from their
distribution. Here the lengths are drawn first and never rejected; then one point per
n-gram is drawn among the units that no n-gram needs, and each n-gram is inserted at its
point. So nothing overlaps and nothing is drawn again.
"""

import numpy as np

from bertjax.data import counter_rng
from bertjax.data.masking import choose
from bertjax.data.masking.choose import Chosen, Units
from bertjax.data.ragged import ramps


def choose_ngrams(
    keys: np.ndarray,
    units: Units,
    begins: np.ndarray,
    budget: np.ndarray,
    law: tuple[float, ...],
) -> Chosen:
    """Choose n-grams of units up to a budget of tokens, i64 [b].

    `begins` bool [b, L] is true where units begin. `law` holds the shares of the
    lengths 1, 2, ... n-grams never overlap and never extend over a token that may not
    be predicted. They are taken in the order in which they were drawn; the first that
    exceeds the budget is cut to the units that fit. The rest of the budget then goes to
    the first units of the later n-grams, and at last to any single unit that fits. If a
    stretch of text has fewer units than were drawn for it, its last n-gram is cut.
    `lengths` of the result are those of the n-grams taken, before the budget cuts them:
    they follow `law` where stretches are long (in short stretches, `law` cut at their
    end). Fewer n-grams fit at the ends of a stretch, so that its outermost units are
    chosen less often.

    Worked example: seven units of one token each, budget 3; lengths 2, 1, 3 are drawn,
    and points 0.1, 0.9, 0.5 of the row. One unit is left over, so each point falls
    before it (0.1) or after it (0.5, 0.9). In the order of drawing, the first two
    n-grams use up the budget; the third is not taken.

        units     a  b  c  d  e  f  g
        n-grams   1  1     3  3  3  2
        chosen    a  b              g
    """
    if not len(units.first):
        return choose.all_tokens(units, np.zeros(0, np.int64), None, begins.shape)
    start, count, back = _place(keys, units, budget, law, begins.shape[1])
    number, left, lengths = _spend(start, count, units, budget)
    start, number = start.take(back), number.take(back)  # in the order of the text
    taken = number > 0
    start, number = start[taken], number[taken]
    unit = np.repeat(start, number) + ramps(number)
    span = np.repeat(units.first[start], number)
    rows = np.flatnonzero(left > 0)
    if rows.size:
        more = _fill(keys, rows, unit, units, begins, left)
        at = np.searchsorted(unit, more)
        unit = np.insert(unit, at, more)
        span = np.insert(span, at, units.first[more])
    chosen = choose.all_tokens(units, unit, span, begins.shape)
    return chosen._replace(lengths=lengths)


def _place(
    keys: np.ndarray,
    units: Units,
    budget: np.ndarray,
    law: tuple[float, ...],
    length: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw n-grams and their places.

    Returns the first unit and the number of units (0: no n-gram) of each, i64 [b, K] in
    the order of drawing, and i64 [b * K], the index that sorts them in text order.
    """
    bounds = units.bounds
    n = np.diff(bounds)[:, None]
    # A quarter more units than the budget needs on average, since units differ in size.
    tokens = np.diff(np.append(0, np.cumsum(units.size))[bounds])
    goal = np.minimum(n[:, 0], 5 * budget * n[:, 0] // np.maximum(4 * tokens, 1) + 3)
    goal[budget <= 0] = 0
    lengths = _draw_lengths(keys, goal, law)
    lengths *= np.cumsum(lengths, axis=1) - lengths < goal[:, None]
    b, K = lengths.shape
    # One integer to sort by: a point in the row, then the slot and length of the draw.
    of_slot, of_length = (choose.low_bits(m).item() for m in (length, len(law) + 1))
    low = of_length.bit_length()
    high = low + of_slot.bit_length()
    point = counter_rng.bits(counter_rng.fold(keys, "place")[:, None], np.arange(K))
    point >>= 1
    point |= (lengths == 0) * choose.TOP  # sort these after all others
    point = point >> high << high
    point |= ((np.arange(K) << low) | lengths).astype(np.uint64)
    point.sort(axis=1)
    lengths = (point & of_length).astype(np.int64)
    back = (point >> low & of_slot).astype(np.int64) + np.arange(b)[:, None] * K
    # The point in units of the row, the stretch it falls in, and the place within that.
    x = (point >> high) * (n * 2.0 ** (high - 63))
    unit = np.minimum(x.astype(np.int64), n - 1) + bounds[:-1, None]
    opens, stretch = _stretches(units)
    stretch = stretch.take(unit, mode="clip")
    first = opens.take(stretch)
    room = opens.take(stretch + 1) - first
    at = (x - (first - bounds[:-1, None])) / room
    # The units in all n-grams of a stretch, and in those of them that come before each.
    total = np.bincount(stretch.reshape(-1), lengths.reshape(-1), len(opens))
    total = total.astype(np.int64)
    offset = (np.cumsum(lengths) - lengths.reshape(-1)).reshape(b, K)
    offset -= (np.cumsum(total) - total).take(stretch)
    spare = np.maximum(room - total.take(stretch), 0)
    offset += np.minimum((at * (spare + 1)).astype(np.int64), spare)
    lengths = np.clip(room - offset, 0, lengths)
    start, count = np.empty((2, b, K), np.int64)
    start.reshape(-1)[back] = first + offset
    count.reshape(-1)[back] = lengths
    return start, count, back.reshape(-1)


def _draw_lengths(
    keys: np.ndarray, goal: np.ndarray, law: tuple[float, ...]
) -> np.ndarray:
    """Draw lengths i64 [b, K], enough for each row's sum to reach its goal."""
    bounds = np.cumsum(law) / np.sum(law)
    # As 64-bit integers. A law that ends in shares of 0 reaches 1 before its end.
    bounds = (bounds[:-1][bounds[:-1] < 1] * 2.0**53).astype(np.uint64) << 11
    n = np.arange(1, len(law) + 1)
    mean = np.dot(law, n)
    # If the shares sum to slightly more than 1, the variance can come out negative.
    spread = 3 * np.sqrt(max(np.dot(law, n**2) - mean**2, 0.0))
    most = int(goal.max(initial=0))
    # Solves K * mean - spread * sqrt(K) = most: very few rows draw less.
    K = int(((spread + np.sqrt(spread**2 + 4 * mean * most)) / (2 * mean)) ** 2) + 1
    while True:
        K = min(K, most)
        word = counter_rng.bits(counter_rng.fold(keys, "length")[:, None], np.arange(K))
        lengths = np.ones(word.shape, np.uint16)
        for bound in bounds:
            lengths += word >= bound
        lengths = lengths.astype(np.int64)
        if K == most or (lengths.sum(axis=1) >= goal).all():
            return lengths
        K *= 2


def _stretches(units: Units) -> tuple[np.ndarray, np.ndarray]:
    """Find the stretches of neighboring units.

    Returns the first unit of each stretch, with U at the end, and the stretch of each
    unit.
    """
    begins = units.first != np.append(-1, units.first + units.size)[:-1]
    rows = units.bounds[:-1]
    begins[rows[rows < len(begins)]] = True
    opens = np.append(np.flatnonzero(begins), len(begins))
    return opens, np.cumsum(begins) - 1


def _spend(
    start: np.ndarray, count: np.ndarray, units: Units, budget: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return how many units of each n-gram [b, K] are taken, the rest of the budgets
    [b], and the lengths [n] of the n-grams taken, before they were cut."""
    end = units.first + units.size
    tokens = end.take(start + count - 1, mode="clip")
    tokens -= units.first.take(start, mode="clip")
    tokens *= count > 0
    total = np.cumsum(tokens, axis=1)
    over = total > budget[:, None]
    number = count * ~over
    left = budget - np.max(total, axis=1, initial=0, where=~over)
    if not over.size:  # no row has a budget
        return number, left, count[:0].reshape(-1)
    rows = np.flatnonzero(over[:, -1])
    at = over[rows].argmax(axis=1)
    first = start[rows, at]
    low = units.first[first]
    fits = np.searchsorted(end, low + left[rows], "right") - first
    number[rows, at] = fits
    left[rows] -= np.where(fits > 0, end[first + fits - 1] - low, 0)
    lengths = count[number > 0]
    hungry = left[rows] > 0
    rows, at = rows[hungry], at[hungry]
    if rows.size:
        behind = np.arange(start.shape[1]) > at[:, None]
        size = units.size.take(start[rows], mode="clip")
        size *= behind & (count[rows] > 0)
        taken = choose.take_in_order(size, left[rows])
        left[rows] -= (size * taken).sum(axis=1)
        number[rows] += taken
    return number, left, lengths


def _fill(
    keys: np.ndarray,
    rows: np.ndarray,
    taken: np.ndarray,
    units: Units,
    begins: np.ndarray,
    left: np.ndarray,
) -> np.ndarray:
    """Choose single untaken units of these rows that fit in the rest of the budgets."""
    length = begins.shape[1]
    free = np.ones(len(units.first), bool)
    free[taken] = False
    low, high = units.bounds[rows], units.bounds[rows + 1]
    number = high - low
    mine = np.repeat(low, number) + ramps(number)  # the units of these rows
    first = units.first[mine] - np.repeat(rows - np.arange(len(rows)), number) * length
    part = Units(first, units.size[mine], np.append(0, np.cumsum(number)))
    candidate = begins[rows]
    candidate.reshape(-1)[first] = free[mine]
    noise = choose.draw_noise(keys[rows], length)
    return mine[choose.choose_units(noise, part, candidate, left[rows])]
