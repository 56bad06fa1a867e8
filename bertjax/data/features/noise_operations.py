# SPDX-License-Identifier: Apache-2.0
"""The operations of data.noise, on whole blocks of texts at a time.

Each operation returns new texts (noise_texts.py); the key of the text and the number of
the operation address all of its random draws.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertjax import UserError, registry
from bertjax.data import counter_rng
from bertjax.data.features.base import percent
from bertjax.data.features.noise_texts import (
    BEGINS_UNIT,
    ENDS_SENTENCE,
    FRAME,
    FREE,
    Corruption,
    Text,
    Units,
    count_share,
    find_units,
)
from bertjax.data.masking.choose import choose_subsets
from bertjax.data.ragged import ramps

_AHEAD = 16  # spans drawn at first beyond the expected number

# BART's own settings: fairseq issue 1899, and the README of examples/bart.
DEFAULT = "permute,infill:poisson:3.5:0.3:0.1"


@dataclass(frozen=True)
class Operation:
    """A part of data.noise: its name and its numbers."""

    name: str
    share: float = 1.0

    form = "NAME:SHARE"
    needs_mask = False

    @classmethod
    def read(cls, name: str, values: list[str]) -> "Operation":
        """Create the operation from the values after its name. Raises ValueError."""
        numbers = [float(value) for value in values]
        if not all(0 <= number <= 1 for number in numbers):
            raise ValueError("a share is from 0 to 1")
        return cls(name, *numbers)

    def __str__(self) -> str:
        return f"{self.name} {percent(self.share)}"

    def added(self, tokens: np.ndarray) -> np.ndarray:
        """Return the most tokens that it can add to this many tokens."""
        return np.zeros_like(tokens)

    def apply(self, text: Text, keys: np.ndarray, number: int, how: Corruption) -> Text:
        """Return the changed texts; keys u64 [s]; number: that of the operation."""
        key = counter_rng.fold(keys, "operation", number)
        return self.change(text, key, how)

    def change(self, text: Text, key: np.ndarray, how: Corruption) -> Text:
        raise NotImplementedError

    def choose(self, text: Text, key: np.ndarray) -> tuple[np.ndarray, int]:
        """Choose a share of the units; return their tokens, i64, ascending, and the
        number of units chosen."""
        units = find_units(text)
        number = count_share(self.share, units.many)
        unit = choose_subsets(counter_rng.fold(key, "choose"), units.many, number)
        unit += np.repeat(units.begin, number)
        size = units.size[unit]
        return np.repeat(units.first[unit], size) + ramps(size), len(unit)


class Whole(Operation):
    """An operation on whole texts: on a share of them, or on all if none is given."""

    form = "NAME, or NAME:SHARE, the share of the texts"

    def is_done(self, key: np.ndarray) -> np.ndarray:
        return counter_rng.uniform(counter_rng.fold(key, "texts"), 0) < self.share

    def __str__(self) -> str:
        return self.name if self.share == 1 else super().__str__()


class Permute(Whole):
    """Sentences are put in random order within their document, all orders equally
    likely.

    A sentence ends at a full stop or the like (Tokenizer.sentence_ends).
    """

    def change(self, text: Text, key: np.ndarray, how: Corruption) -> Text:
        codes, owner = text.codes, text.owner
        frame, ends = (codes & FRAME) > 0, (codes & ENDS_SENTENCE) > 0
        begins, runs = frame.copy(), frame.copy()
        begins[1:] |= frame[:-1] | (ends[:-1] & ~ends[1:])
        runs[1:] |= frame[:-1]
        at = np.cumsum(text.size) - text.size
        begins[at] = runs[at] = True
        first = np.flatnonzero(begins)
        size = np.diff(first, append=len(codes))
        of, run = owner[first], np.cumsum(runs)[first]
        nth = np.arange(len(first)) - np.searchsorted(of, of)
        noise = counter_rng.bits(key[of], nth) >> np.uint64(1)
        noise = np.where(self.is_done(key)[of], noise, nth.astype(np.uint64))
        order = np.lexsort((noise, run))
        how.counts["sentences"] += int((~frame[first]).sum())
        how.counts["sentences_moved"] += int((order != np.arange(len(order))).sum())
        size = size[order]
        source = np.repeat(first[order], size) + ramps(size)
        return Text(codes[source], text.size)


class Rotate(Whole):
    """Each document begins at a random token and wraps around its end."""

    def change(self, text: Text, key: np.ndarray, how: Corruption) -> Text:
        codes, owner = text.codes, text.owner
        runs = (codes & FRAME) > 0
        runs[1:] |= runs[:-1].copy()
        runs[np.cumsum(text.size) - text.size] = True
        first = np.flatnonzero(runs)
        size, of = np.diff(first, append=len(codes)), owner[first]
        nth = np.arange(len(first)) - np.searchsorted(of, of)
        by = counter_rng.below(key[of], nth, size) * self.is_done(key)[of]
        how.counts["documents_rotated"] += int((by > 0).sum())
        place = ramps(size) + np.repeat(by, size)
        place -= np.repeat(size, size) * (place >= np.repeat(size, size))
        return Text(codes[np.repeat(first, size) + place], text.size)


class Mask(Operation):
    """A share of the units are masked, with one mask per token."""

    needs_mask = True

    def change(self, text: Text, key: np.ndarray, how: Corruption) -> Text:
        at, units = self.choose(text, key)
        how.counts["masked_units"] += units
        codes = text.codes.copy()
        codes[at] = how.mask_id
        return text._replace(codes=codes)


class Substitute(Operation):
    """A share of the units are replaced, with one random piece per token."""

    def change(self, text: Text, key: np.ndarray, how: Corruption) -> Text:
        at, units = self.choose(text, key)
        how.counts["substituted_units"] += units
        of, codes = text.owner[at], text.codes.copy()
        place = at - (np.cumsum(text.size) - text.size)[of]
        new = how.draw_pieces(counter_rng.fold(key, "replace")[of], place)
        codes[at] = new & ~np.int32(BEGINS_UNIT) | codes[at] & BEGINS_UNIT
        return text._replace(codes=codes)


class Delete(Operation):
    """A share of the units are deleted."""

    def change(self, text: Text, key: np.ndarray, how: Corruption) -> Text:
        at, units = self.choose(text, key)
        how.counts["deleted_units"] += units
        gone = np.bincount(text.owner[at], minlength=len(text.size))
        return Text(np.delete(text.codes, at), text.size - gone)


class Insert(Operation):
    """Random pieces are inserted between tokens, as many as a share of the tokens."""

    def added(self, tokens: np.ndarray) -> np.ndarray:
        return count_share(self.share, tokens)

    def change(self, text: Text, key: np.ndarray, how: Corruption) -> Text:
        tokens = find_units(text._replace(codes=text.codes | BEGINS_UNIT))
        number = count_share(self.share, tokens.many)
        how.counts["inserted"] += int(number.sum())
        key_of_places = counter_rng.fold(key, "choose")
        place = choose_subsets(key_of_places, tokens.many + number, number)
        of, nth = np.repeat(np.arange(len(number)), number), ramps(number)
        at = tokens_at(tokens, of, place - nth)
        new = how.draw_pieces(counter_rng.fold(key, "replace")[of], nth)
        return Text(np.insert(text.codes, at, new), text.size + number)


def tokens_at(units: Units, of: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return the first token of unit `number` of the texts `of`; for a number one
    beyond the last unit, the position after it. Each text must have a unit."""
    beyond = number == units.many[of]
    unit = units.begin[of] + number - beyond
    return units.first[unit] + units.size[unit] * beyond


@dataclass(frozen=True)
class Infill(Operation):
    """Spans of units become one mask each; their lengths follow a Poisson distribution.

    Lengths are drawn until a share of the units is hidden, and the last one is trimmed
    to that share. The places of the spans are uniform, and spans do not overlap; a span
    that a special token interrupts has a mask on both sides of it. A length of 0
    inserts a mask between two units, unless the text would become longer than before:
    such spans are refused.
    """

    mean: float = 3.0
    random: float = 0.0

    form = "infill:poisson:MEAN, or :MEAN:SHARE, or :MEAN:SHARE:RANDOM"
    needs_mask = True

    @classmethod
    def read(cls, name: str, values: list[str]) -> "Infill":
        if not values or values[0] != "poisson" or not 2 <= len(values) <= 4:
            raise ValueError
        mean, share, random = map(float, [*values[1:], "0.3", "0"][:3])
        if len(values) == 3:
            random = 0.0
        if not 0.1 <= mean <= 1000:
            raise ValueError("a mean is from 0.1 to 1000")
        if not (0 <= share <= 1 and 0 <= random <= 1):
            raise ValueError("a share is from 0 to 1")
        return cls(name, share, mean, random)

    def __str__(self) -> str:
        return f"infill {percent(self.share)} in spans of {self.mean:g}"

    def change(self, text: Text, key: np.ndarray, how: Corruption) -> Text:
        units = find_units(text)
        budget = count_share(self.share, units.many)
        length, spans = draw_lengths(counter_rng.fold(key, "length"), budget, self.mean)
        if how.drawn is not None:
            how.drawn.append(length)
        # Choose which members of the sequence of kept units and spans are spans.
        of, nth = np.repeat(np.arange(len(spans)), spans), ramps(spans)
        noise = counter_rng.bits(counter_rng.fold(key, "order")[of], nth)
        length = length[np.lexsort((noise, of))]
        key_of_places = counter_rng.fold(key, "choose")
        place = choose_subsets(key_of_places, units.many - budget + spans, spans)
        hidden = np.cumsum(length) - length
        hidden -= np.repeat((np.cumsum(budget) - budget), spans)
        begin = place - nth + hidden
        at = tokens_at(units, of, begin)

        some = length > 0
        last = units.begin[of[some]] + begin[some] + length[some] - 1
        edges = np.zeros(len(text.codes) + 1, np.int32)
        edges[at[some]] += 1
        edges[units.first[last] + units.size[last]] -= 1
        free = (text.codes & FREE) > 0
        gone = (np.cumsum(edges[:-1]) > 0) & free
        is_mask = np.zeros(len(gone), bool)
        is_mask[at[some]] = True
        is_mask[1:] |= gone[1:] & ~free[:-1]
        stays = ~gone | is_mask
        codes, owner = text.codes.copy(), text.owner
        first = np.cumsum(text.size) - text.size
        places = np.flatnonzero(is_mask)
        whose = owner[places]
        codes[places] = how.draw_masks(key[whose], places - first[whose], self.random)
        shrunk = np.bincount(owner[~stays], minlength=len(text.size))

        between = np.flatnonzero(~some)
        nth_between = ramps(np.bincount(of[between], minlength=len(spans)))
        fits = nth_between < shrunk[of[between]]
        how.counts["spans"] += len(length)
        how.counts["zero_length_spans"] += len(between)
        how.counts["zero_length_spans_refused"] += int((~fits).sum())
        between = between[fits]
        of, at = of[between], at[between]
        slot = nth_between[fits] + text.size[of]  # distinct from the tokens' slots
        added = how.draw_masks(key[of], slot, self.random)
        at = np.cumsum(stays)[at - 1] * (at > 0)  # the place after the deletions
        codes = np.insert(codes[stays], at, added)
        inserted = np.bincount(of, minlength=len(text.size))
        return Text(codes, text.size - shrunk + inserted)


def draw_lengths(
    keys: np.ndarray, budget: np.ndarray, mean: float
) -> tuple[np.ndarray, np.ndarray]:
    """Draw lengths from a Poisson distribution until they reach the budget; trim the
    last one.

    keys u64 [s], budget i64 [s]. Returns all lengths, key after key, i64, and their
    number for each key.

    Worked example: a budget of 7, and draws of 3, 0, 5, return lengths 3, 0, 4.
    """
    table = poisson_table(mean)
    wide = int(budget.max(initial=0) / mean * 1.25) + _AHEAD
    while True:
        draw = counter_rng.uniform(keys[:, None], np.arange(wide))
        length = np.searchsorted(table, draw, "right").reshape(draw.shape)
        total = np.cumsum(length, axis=1)
        if (total[:, -1] >= budget).all():
            break
        wide *= 2
    used = total - length < budget[:, None]
    length -= np.maximum(total - budget[:, None], 0) * used
    return length[used], np.count_nonzero(used, axis=1)


def poisson_table(mean: float) -> np.ndarray:
    """Return the cumulative shares of the lengths 0, 1, ..., f64."""
    most = int(mean + 12 * math.sqrt(mean) + 24)
    logs = [k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(most)]
    return np.cumsum(np.exp(logs))


OPERATIONS: dict[str, type[Operation]] = {
    "permute": Permute,
    "infill": Infill,
    "mask": Mask,
    "delete": Delete,
    "insert": Insert,
    "substitute": Substitute,
    "rotate": Rotate,
}


def read_noise(text: str) -> list[Operation]:
    """Read data.noise; if it is empty, return BART's operations. Raises UserError.

    >>> [str(o) for o in read_noise("permute,infill:poisson:3.5:0.3,delete:0.1")]
    ['permute', 'infill 30% in spans of 3.5', 'delete 10%']
    """
    operations = []
    for part in (text or DEFAULT).split(","):
        name, *values = part.strip().split(":")
        kind: Any = registry.pick(f"data.noise={text!r}: operation", name, OPERATIONS)
        try:
            if len(values) > 1 and kind is not Infill:
                raise ValueError
            if not values and not issubclass(kind, Whole):
                raise ValueError
            operations.append(kind.read(name, values))
        except ValueError as e:
            why = f" ({e})" if str(e).startswith("a ") else ""
            form = kind.form.replace("NAME", name)
            raise UserError(
                f"data.noise={text!r}: {part!r} is not {form}{why}"
            ) from None
    return operations
