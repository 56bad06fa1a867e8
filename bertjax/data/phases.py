# SPDX-License-Identifier: Apache-2.0
"""Phases of a run: length, batch size and mask rate over time, with one data cursor.

`phases="percent=90 length=128 batch_size=256; length=512 batch_size=64"`: each phase
but the last says how long it is; what it does not name is the config's own value.

The cursor counts examples. Where a phase changes batch size or mask rate alone, the
next example is the next example. Where it changes the length, rows are others, in an
order of their own, and the cursor keeps its place in the epoch: the same share of its
rows lies behind. `find_repeats` says what that costs.
"""

import bisect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from bertjax import UserError, registry

EXTENTS = ("steps", "percent", "examples", "tokens", "epochs")
SETTINGS = {"length": int, "batch_size": int, "mask_rate": str, "objective": str}
_COMMA = re.compile(rf",(?=\s|$|({'|'.join((*EXTENTS, *SETTINGS))})=)")


@dataclass(frozen=True)
class Wanted:
    """A phase as the config has it; the last one has no extent."""

    unit: str
    extent: float
    batch_size: int
    length: int
    mask_rate: float | str | None  # a ramp is text, 0.3:0.15; None: the masking's own
    objective: str = ""  # "": the config's

    @property
    def shape(self) -> tuple[int, int, str]:
        """What phases have in common that share a compiled program."""
        return self.length, self.batch_size, self.objective


@dataclass(frozen=True)
class Phase:
    """A phase of a run: from step `start` on; its first row is number `first`, and an
    epoch has `n` rows. ramp_start: where a ramp of its mask rate began, if that is
    another step."""

    start: int
    first: int
    n: int
    batch_size: int
    length: int
    mask_rate: float | str | None
    objective: str = ""
    ramp_start: int | None = None

    @property
    def shape(self) -> tuple[int, int, str]:
        """As a Wanted has it."""
        return self.length, self.batch_size, self.objective

    def example(self, step: int) -> int:
        """Return the number of the first row of a step of this phase."""
        return self.first + (step - self.start) * self.batch_size


def parse_phases(
    text: str, batch_size: int, length: int, mask_rate: float | str | None
) -> list[Wanted]:
    """Read the config's `phases`; an empty text is one phase of these settings.

    Raises UserError naming the phase and what is wrong with it.

    >>> [p.length for p in parse_phases("percent=90; length=512", 8, 128, None)]
    [128, 512]
    """
    # Commas part what a phase says, but not the options of an objective.
    parts = [_COMMA.sub(" ", p).split() for p in text.split(";")]
    own = {"batch_size": batch_size, "length": length, "mask_rate": mask_rate}
    wanted = []
    for number, words in enumerate(parts):
        where = f"phases={text!r}: phase {number + 1}"
        given: dict[str, Any] = {}
        for word in words:
            key, _, value = word.partition("=")
            kind = registry.pick(where, key, dict.fromkeys(EXTENTS, float) | SETTINGS)
            if key in given:
                raise UserError(f"{where}: {word!r} is given twice")
            if key == "objective" or (kind is str and ":" in value):
                # What it may be its readers say.
                given[key] = value
                continue
            try:
                read = float(value)
                if kind is int and read != int(read):
                    raise ValueError
            except (ValueError, OverflowError):
                raise UserError(f"{where}: {word!r} is not {key}=NUMBER") from None
            if not 0 < read < 1e15:
                raise UserError(f"{where}: {word!r} is out of range")
            given[key] = read if kind is str else kind(read)
        extents = [u for u in EXTENTS if u in given]
        last = number == len(parts) - 1
        if len(extents) != (not last):
            units = ", ".join(EXTENTS)
            need = f"none of {units}: the last phase is the rest"
            raise UserError(f"{where} needs {need if last else f'one of {units}'}")
        wanted.append(
            Wanted(
                unit=extents[0] if extents else "",
                extent=given[extents[0]] if extents else math.inf,
                **own | {name: given[name] for name in SETTINGS if name in given},
            )
        )
    percent = sum(p.extent for p in wanted if p.unit == "percent")
    if percent >= 100:
        raise UserError(f"phases={text!r}: {percent:g}% leave nothing for the last one")
    return wanted


def place_phases(
    wanted: Sequence[Wanted], total: int, rows: Callable[[Wanted], int]
) -> tuple[Phase, ...]:
    """Fix where phases begin; rows(phase) are those of an epoch of it.

    Phases that would begin at or after the `total` steps are left out.

    Worked example (1,000 rows of 128, 240 of 512, batches of 100): after 15 at 128
    half of epoch 1 is seen, so the phase at 512 begins at row 240 + 120 = 360.
    """
    placed: list[Phase] = []
    start = 0
    for phase in wanted:
        n = rows(phase)
        how = phase.batch_size, phase.length, phase.mask_rate, phase.objective
        placed.append(Phase(start, 0, n, *how))
        if not phase.unit:  # the last phase: the rest
            break
        start += max(1, steps_of(phase.unit, phase.extent, placed[-1], total))
        if start >= total:
            break
    return _carry_cursor(placed, 1)


def steps_of(unit: str, number: float, phase: Any, total: int) -> int:
    """Convert a duration to steps of a phase, rounded up; percent is of the `total`.

    Tokens are slots, padding included. phase: has batch_size, length and n.
    """
    a_step = {
        "steps": 1.0,
        "percent": 100 / max(total, 1),
        "examples": phase.batch_size,
        "tokens": phase.batch_size * phase.length,
        "epochs": phase.batch_size / phase.n,
    }[unit]
    return math.ceil(number / a_step - 1e-9)


def _carry_cursor(phases: Sequence[Phase], known: int) -> tuple[Phase, ...]:
    """Set `first` of all phases but the `known` first ones."""
    out = [*phases[:known]]
    for phase in phases[known:]:
        before = out[-1]
        first = move_cursor(before.example(phase.start), before.n, phase.n)
        out.append(replace(phase, first=first))
    return tuple(out)


def rates_of_shape(
    every: Iterable[Wanted | Phase], phase: Wanted | Phase
) -> tuple[Any, ...]:
    """Return the mask rates of all phases of this one's shape: they share P."""
    return tuple({p.mask_rate for p in every if p.shape == phase.shape})


def move_cursor(example: int, n: int, other: int) -> int:
    """Return the row with the same place in its epoch: of `other` rows instead of n.

    Rounded up. The rows from there on are in an order of their own: within an epoch
    they hold text that was seen before (`find_repeats`).

    >>> move_cursor(1500, 1000, 240), move_cursor(1500, 1000, 1000)
    (360, 1500)
    """
    epoch, slot = divmod(example, n)
    return epoch * other + -(-slot * other // n)


class Repeat(NamedTuple):
    """What a change of length costs that is not at the end of an epoch.

    before, phase: on both sides of it. seen: the share of the epoch that lies behind.
    again: the share of the text in the rest of the epoch's rows that was seen in this
    epoch. missed: the share of the epoch's text that is not seen in it.
    """

    before: Phase
    phase: Phase
    epoch: int
    seen: float
    again: float
    missed: float

    def __str__(self) -> str:
        return (
            f"phases: rows change from {self.before.length} to {self.phase.length} "
            f"tokens at step {self.phase.start:,}, after {self.epoch + self.seen:.2f} "
            f"epochs: about {self.again:.0%} of the text in the rest of that epoch "
            f"was seen in it before, and about {self.missed:.0%} of its text is not "
            "seen in it; to avoid this, let the phase end at a whole number of epochs"
        )


def find_repeats(phases: Sequence[Phase]) -> list[Repeat]:
    """Find where the length changes within an epoch, more than a batch from its ends.

    The orders of two lengths are independent: where a share c of the epoch's rows was
    seen at one length, rows of another hold about c of text that was seen. Lengths of
    which an epoch has the same number of rows have the same order (a task's rows, short
    documents).

    Worked example: half an epoch at 128, the rest at 512: half of the text in the rest
    was seen, and a quarter of all text is not.
    """
    repeats = []
    done: dict[int, float] = {}  # rows of an epoch: the share seen of this epoch
    epoch = 0
    for before, phase in itertools.pairwise(phases):
        end = before.example(phase.start) / before.n
        if math.floor(end) > epoch:
            done, epoch = {}, math.floor(end)
        begin = max(before.first / before.n, epoch)
        done[before.n] = done.get(before.n, 0.0) + end - begin
        near = max(p.batch_size / p.n for p in (before, phase))
        seen = end - epoch
        if before.n == phase.n or not near <= seen <= 1 - near:
            continue
        unseen = math.prod(1 - c for n, c in done.items() if n != phase.n)
        own = done.get(phase.n, 0.0) + 1 - seen
        missed = unseen * (1 - own)
        repeats.append(Repeat(before, phase, epoch, seen, 1 - unseen, missed))
    return repeats


def change_phases(
    planned: Sequence[Phase], past: Sequence[Phase], step: int
) -> tuple[Phase, ...]:
    """Go on from `step` with other phases than the run began with.

    planned: as the new config has them from step 0 on; past: those that led to `step`.
    What was stays as it was; the cursor goes on from there, and so does a ramp of mask
    rates, unless it is another one or a later phase's. With nothing new the result is
    `past`.
    """
    before = [p for p in past if p.start <= step]
    if not before:
        return tuple(planned)
    now = [p for p in planned if p.start <= step][-1]
    later = [p for p in planned if p.start > step]
    last = before[-1]
    own = replace(now, start=last.start, first=last.first, ramp_start=last.ramp_start)
    same = own == last
    begun = last.start if last.ramp_start is None else last.ramp_start
    is_other = (now.mask_rate, now.objective) != (last.mask_rate, last.objective)
    # Another batch size alone may move where a phase begins, too.
    is_other |= now.length != last.length and now.start > begun
    ramp = None if is_other else begun
    changed = [] if same else [replace(now, start=step, ramp_start=ramp)]
    phases = _carry_cursor([*before, *changed, *later], len(before))
    # What would have begun at this very step has not: another is in its place.
    ends = [*(p.start for p in phases[1:]), math.inf]
    return tuple(p for p, end in zip(phases, ends, strict=True) if p.start < end)


def skip_batches(past: Sequence[Phase], step: int, until: int) -> tuple[Phase, ...]:
    """Go on from `step` with the rows that come after those of update `until` - 1.

    Returns the phases up to `step`, the last of which begins there: `past` for
    change_phases, which carries the cursor on. A ramp of mask rates goes on.
    """
    then = [p for p in past if p.start <= until][-1]
    now = [p for p in past if p.start <= step][-1]
    first = move_cursor(then.example(until), then.n, now.n)
    before = [p for p in past if p.start < step]
    ramp = now.start if now.ramp_start is None else now.ramp_start
    return (*before, replace(now, start=step, first=first, ramp_start=ramp))


def count_steps(
    unit: str, number: float, place: Callable[[int], Sequence[Phase]]
) -> int:
    """Return the fewest steps that make up `number` steps, examples, tokens or epochs.

    place(total) says where the phases of a run of `total` steps begin. Tokens are
    slots, padding included.
    """
    if unit == "steps" or not number:
        return int(number)

    def reached(total: int) -> bool:
        return measure(unit, place(total), total) >= number * (1 - 1e-12)

    high = 1
    while not reached(high):
        high *= 2
    return bisect.bisect_left(range(high), True, high // 2 + 1, key=reached)


def steps_within(
    unit: str, number: float, placed: Sequence[Phase], total: int, end: bool = False
) -> int:
    """Return how many steps make up a duration at the begin of a run, or at its `end`.

    total + 1 where the whole run is shorter.

    Worked example: 10 steps of 8 rows, then 10 of 32: 96 examples are 11 steps at the
    begin and 3 at the end.
    """
    if unit in ("steps", "percent"):
        return math.ceil(number * (total / 100 if unit == "percent" else 1) - 1e-9)
    whole = measure(unit, placed, total)

    def within(steps: int) -> float:
        if end:
            return whole - measure(unit, placed, total - steps)
        return measure(unit, placed, steps)

    steps = range(total + 1)
    return bisect.bisect_left(steps, number * (1 - 1e-9), key=within)


def measure(unit: str, phases: Sequence[Phase], total: int) -> float:
    """Return how many examples, token slots or epochs `total` steps go through."""
    ends = [*(p.start for p in phases[1:]), total]
    done = 0.0
    for phase, end in zip(phases, ends, strict=True):
        rows = max(min(end, total) - phase.start, 0) * phase.batch_size
        each = {"examples": 1, "tokens": phase.length, "epochs": 1 / phase.n}
        done += rows * each[unit]
    return done


def to_plain(phases: Iterable[Phase]) -> list[dict[str, Any]]:
    """Write phases as run.json and checkpoints hold them."""
    return [
        {k: v for k, v in asdict(p).items() if k != "ramp_start" or v is not None}
        for p in phases
    ]


def from_plain(records: Sequence[Mapping[str, Any]]) -> tuple[Phase, ...]:
    """Read phases back."""
    return tuple(Phase(**p) for p in records)
