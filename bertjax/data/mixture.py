# SPDX-License-Identifier: Apache-2.0
"""Mix components (languages, domains) in fixed shares, each without repetition.

An epoch of the mixture has as many rows as all components together; each component gets
a fixed number of them, its slots. An epoch is cut into blocks of positions; a block
holds each component's share of it, rounded, in random order. So arithmetic tells how
many rows of a component come before a position. A component yields its rows in passes:
all of them in a random order, then all of them again in another. A small language
repeats only after all of it was seen.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bertjax import UserError, registry
from bertjax.data import counter_rng

BLOCK = 256  # positions shuffled together: each block holds the components' shares


class Located(NamedTuple):
    """The rows at some positions: component and example i64 [b], and the keys u64 [b]
    of everything that is drawn for them."""

    component: np.ndarray
    example: np.ndarray
    keys: np.ndarray


@dataclass(frozen=True)
class Mixture:
    """Components: their names, their numbers of rows, and their slots per epoch."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    slots: tuple[int, ...]

    @property
    def n(self) -> int:
        """The number of rows of an epoch."""
        return sum(self.slots)

    def locate(self, seed: int, position: np.ndarray) -> Located:
        """Find the rows at positions i64 [b] of the run.

        Worked example: sizes (10, 2), slots (8, 4), so an epoch of 12. Position 14 is
        slot 2 of epoch 1. Say that the block puts the second component there, for the
        second time in this epoch. Then 4 + 1 rows of it came before, so this is number
        1 of its own pass 2.
        """
        epoch, slot = np.divmod(position, self.n)
        if len(self.sizes) == 1:
            order = counter_rng.fold(seed, "order", epoch)
            example = counter_rng.permute(slot, self.n, order)
            keys = counter_rng.fold(seed, epoch, example)
            return Located(np.zeros_like(example), example, keys)
        component, nth = self._draw(seed, epoch, slot)
        example = np.zeros_like(nth)
        keys = np.zeros(nth.shape, np.uint64)
        for k in np.unique(component):
            mine = np.flatnonzero(component == k)
            own = counter_rng.fold(seed, self.names[k])
            cycle, at = np.divmod(nth[mine], self.sizes[k])
            order = counter_rng.fold(own, "order", cycle)
            example[mine] = counter_rng.permute(at, self.sizes[k], order)
            keys[mine] = counter_rng.fold(own, cycle, example[mine])
        return Located(component, example, keys)

    def _draw(
        self, seed: int, epoch: np.ndarray, slot: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the component at slots of epochs, and the number of its rows that come
        before in the run, both i64 [b]."""
        blocks = -(-self.n // BLOCK)
        number, row = np.unique(epoch * blocks + slot // BLOCK, return_inverse=True)
        epochs, begin = np.divmod(number, blocks)
        begin *= BLOCK
        size = np.minimum(self.n - begin, BLOCK)
        key = counter_rng.fold(seed, "mixture", epochs)
        before = self._count(key, begin)
        shares = self._count(key, begin + size) - before
        # One more component fills up the last block of an epoch.
        shares = np.column_stack([shares, BLOCK - size])
        kinds = np.tile(np.arange(shares.shape[1]), len(number))
        ordered = np.repeat(kinds, shares.reshape(-1)).reshape(-1, BLOCK)
        place = np.arange(BLOCK)
        words = counter_rng.bits(counter_rng.fold(key, begin)[:, None], place)
        words[place >= size[:, None]] = np.iinfo(np.uint64).max
        shuffled = np.take_along_axis(ordered, np.argsort(words, 1, "stable"), 1)
        # The places of a component, in order, hold its next rows.
        first = np.cumsum(shares, 1) - shares
        rank = np.empty_like(shuffled)
        nth = place - np.take_along_axis(first, ordered, 1)
        np.put_along_axis(rank, np.argsort(shuffled, 1, "stable"), nth, 1)
        component = shuffled[row, slot % BLOCK]
        nth = rank[row, slot % BLOCK] + before[row, component]
        return component, nth + epoch * np.array(self.slots)[component]

    def _count(self, key: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return how many of the first `end` rows of epochs each component has: i64
        [b, components], from the epochs' keys u64 [b].

        The first component gets its share of all rows, the second its share of the
        rest, and so on: floor(share x rows + a random phase), which grows by 0 or 1
        with each row, is right on average, and is exact at the end of an epoch.
        """
        phases = counter_rng.bits(key, np.arange(len(self.slots))[:, None])
        rows, of = end.astype(object), self.n  # Python's integers: no product overflows
        counts = []
        for phase, slots in zip(phases.astype(object), self.slots, strict=True):
            counts.append((rows * slots + phase % of) // of)
            rows = rows - counts[-1]
            of -= slots
        return np.stack(counts, 1).astype(np.int64)

    def lines(self) -> list[str]:
        """Return lines that report how often each component is drawn; none for one."""
        if len(self.names) == 1:
            return []
        total, n = sum(self.sizes), self.n
        return [
            f"{name}: {size:,} rows, {size / total:.2%} of the text, "
            f"{slots / n:.2%} of the batches, {slots / size:.3g} times an epoch"
            for name, size, slots in zip(
                self.names, self.sizes, self.slots, strict=True
            )
        ]


def make_mixture(
    sizes: Mapping[str, int],
    weights: Mapping[str, float] | None = None,
    alpha: float | None = None,
) -> Mixture:
    """Create the mixture of components with these numbers of rows.

    weights: shares of the batches, in any unit; alpha: shares are proportional to
    size^alpha (1: as in the text, 0: all equal; XLM-R, Conneau et al. 2020, section
    3.1, used 0.3). With neither, shares are as in the text. Raises UserError for
    weights that do not fit the names.

    >>> make_mixture({"en": 900, "sw": 100}, alpha=0.5).slots
    (750, 250)
    """
    shares = mixture_shares(sizes, weights, alpha)
    total = sum(sizes.values())
    exact = np.array([shares[name] * total for name in sizes])
    slots = np.maximum(np.floor(exact), 1).astype(np.int64)
    # The rest goes to the largest remainders, so that shares are met to one row.
    left = max(total - int(slots.sum()), 0)
    slots[np.argsort(-(exact - slots), kind="stable")[:left]] += 1
    return Mixture(tuple(sizes), tuple(sizes.values()), tuple(map(int, slots)))


def mixture_shares(
    sizes: Mapping[str, float],
    weights: Mapping[str, float] | None = None,
    alpha: float | None = None,
) -> dict[str, float]:
    """Return the share of each component; they sum to 1.

    q_i = p_i^alpha / sum_j p_j^alpha (Conneau et al. 2020, section 3.1).

    >>> shares = mixture_shares({"a": 0.90, "b": 0.09, "c": 0.01}, alpha=0.3)
    >>> [round(q, 3) for q in shares.values()]
    [0.568, 0.285, 0.147]
    """
    if weights:
        for name in weights:
            registry.pick("data.weights", name, dict(sizes))
        lacking = [name for name in sizes if name not in weights]
        if lacking:
            raise UserError(f"data.weights has no weight for {', '.join(lacking)}")
        raw = {name: float(weights[name]) for name in sizes}
    else:
        total = sum(sizes.values())
        power = 1.0 if alpha is None else alpha
        raw = {name: (size / total) ** power for name, size in sizes.items()}
    # Divide first: a sum of huge weights would be infinite.
    largest = max(raw.values())
    whole = sum(value / largest for value in raw.values())
    return {name: value / largest / whole for name, value in raw.items()}


def read_weights(text: str) -> dict[str, float]:
    """Read "wiki=3,novels=1".

    Raises UserError for a weight that is not a number above 0, or a repeated name.
    """
    weights: dict[str, float] = {}
    for entry in registry.split_list(text):
        name, sign, number = entry.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not sign or not 0 < value < float("inf"):
            raise UserError(
                f"data.weights={text}: {entry!r} is not NAME=NUMBER with a number "
                "above 0"
            )
        if name.strip() in weights:
            raise UserError(f"data.weights={text}: {name!r} is given twice")
        weights[name.strip()] = value
    return weights


def check_names(
    train: Iterable[str], valid: Iterable[str], alpha: float | None
) -> None:
    """Refuse languages that are trained on and never scored: raise UserError.

    This applies only if data.alpha is set, because then the components are languages,
    and if validation sets have names.
    """
    if alpha is None or list(valid) in ([], ["valid"]):
        return
    lacking = [name for name in train if name not in valid]
    if lacking:
        raise UserError(
            f"data.valid has no text for {', '.join(lacking)}: with data.alpha every "
            "component of data.train needs a validation set of its name"
        )
