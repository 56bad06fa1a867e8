# SPDX-License-Identifier: Apache-2.0
"""Phases of a run: length, batch size and mask rate over time, with one data cursor.

`phases="percent=90 length=128 batch_size=256; length=512 batch_size=64"`: each phase
but the last states how long it is; settings that it does not name are the config's.

The cursor counts examples. If a phase changes only batch size or mask rate, it
continues with the next example. If it changes the length, the rows are different and in
an order of their own, and the cursor keeps its place in the epoch: the same share of
the epoch's rows is done. `find_repeats` reports what that costs.
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
    """A phase as the config states it; the last one has no extent."""

    unit: str
    extent: float
    batch_size: int
    length: int
    mask_rate: float | str | None  # a ramp is text, 0.3:0.15; None: the masking's own
    objective: str = ""  # "": the config's

    @property
    def shape(self) -> tuple[int, int, str]:
        """The values that phases must share to use one compiled program."""
        return self.length, self.batch_size, self.objective


@dataclass(frozen=True)
class Phase:
    """A phase of a run. It begins at step `start` with row number `first` of the run;
    an epoch has `n` rows. ramp_start: the step at which a ramp of its mask rate began,
    if that is another step than `start`."""

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
        """As in Wanted."""
        return self.length, self.batch_size, self.objective

    def example(self, step: int) -> int:
        """Return the number of the first row of a step of this phase."""
        return self.first + (step - self.start) * self.batch_size


def parse_phases(
    text: str, batch_size: int, length: int, mask_rate: float | str | None
) -> list[Wanted]:
    """Read the config's `phases`; an empty text is one phase with these settings.

    Raises UserError, which names the phase and the mistake.

    >>> [p.length for p in parse_phases("percent=90; length=512", 8, 128, None)]
    [128, 512]
    """
    # Replace the commas between settings, not those in the options of an objective.
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
                # Readers of these values check them.
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
    """Fix where phases begin; rows(phase) is the number of rows in one of its epochs.

    Phases that would begin at or after step `total` are left out.

    Worked example (1,000 rows of 128, 240 of 512, batches of 100): 15 batches of 128
    are one and a half epochs, so the phase at 512 begins at row 240 + 120 = 360.
    """
    placed: list[Phase] = []
    start = 0
    for phase in wanted:
        n = rows(phase)
        how = phase.batch_size, phase.length, phase.mask_rate, phase.objective
        placed.append(Phase(start, 0, n, *how))
        if not phase.unit:  # the last phase has no extent
            break
        start += max(1, steps_of(phase.unit, phase.extent, placed[-1], total))
        if start >= total:
            break
    return _carry_cursor(placed, 1)


def steps_of(unit: str, number: float, phase: Any, total: int) -> int:
    """Convert a duration to steps of a phase, rounded up; percent is of `total` steps.

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
    """Set `first` of all phases after the first `known` ones."""
    out = [*phases[:known]]
    for phase in phases[known:]:
        before = out[-1]
        first = move_cursor(before.example(phase.start), before.n, phase.n)
        out.append(replace(phase, first=first))
    return tuple(out)


def rates_of_shape(
    every: Iterable[Wanted | Phase], phase: Wanted | Phase
) -> tuple[Any, ...]:
    """Return the mask rates of all phases that share this shape: they share P."""
    return tuple({p.mask_rate for p in every if p.shape == phase.shape})


def move_cursor(example: int, n: int, other: int) -> int:
    """Return the row at the same place in its epoch, with `other` rows instead of n.

    Rounded up. The rows from there on are in an order of their own: within the epoch
    they may hold text that was seen before (`find_repeats`).

    >>> move_cursor(1500, 1000, 240), move_cursor(1500, 1000, 1000)
    (360, 1500)
    """
    epoch, slot = divmod(example, n)
    return epoch * other + -(-slot * other // n)


class Repeat(NamedTuple):
    """The cost of a change of length within an epoch.

    before, phase: the phases on both sides of it. seen: the share of the epoch that is
    done. again: the share of the text in the rest of the epoch's rows that was seen
    before in this epoch. missed: the share of the epoch's text that is never seen in
    it.
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
    """Return the changes of length within an epoch, more than a batch from its ends.

    The orders of two lengths are independent: if a share c of the epoch's rows was seen
    at one length, a share of about c of the text in rows of another length was seen
    too. Two lengths with the same number of rows per epoch have the same order (rows of
    a task, short documents).

    Worked example: half an epoch at 128, the rest at 512: half of the text in the rest
    was seen before, and a quarter of all text is never seen in this epoch.
    """
    repeats = []
    done: dict[int, float] = {}  # rows per epoch -> share of this epoch seen with them
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
    """Continue from `step` with other phases than the run began with.

    planned: the phases of the new config from step 0 on; past: those that led to
    `step`. Past phases stay as they were and the cursor continues. A ramp of mask rates
    continues too, unless the new phase has another ramp or is a later phase. If nothing
    changes, the result is `past`.
    """
    before = [p for p in past if p.start <= step]
    if not before:
        return tuple(planned)
    now = [p for p in planned if p.start <= step][-1]
    later = [p for p in planned if p.start > step]

    def continues(last: Phase) -> bool:
        """Return whether the new config's phase is this one."""
        own = {k: getattr(last, k) for k in ("start", "first", "ramp_start")}
        return replace(now, **own) == last

    # A phase planned to begin at this very step has seen no rows, so the cursor is not
    # carried through it if another replaces it (unless rows were skipped there).
    last, replaced = before[-1], False
    if len(before) > 1 and last.start == step and not continues(last):
        replaced = [*_carry_cursor(before, len(before) - 1)] == before
        before = before[:-1] if replaced else before
        last = before[-1]
    same = continues(last)
    begun = last.start if last.ramp_start is None else last.ramp_start
    is_other = (now.mask_rate, now.objective) != (last.mask_rate, last.objective)
    # A new batch size alone may move the start of a phase, so only lengths count here.
    is_other |= now.length != last.length and now.start > begun
    is_other |= replaced and now.start == step
    ramp = None if is_other else begun
    changed = [] if same else [replace(now, start=step, ramp_start=ramp)]
    phases = _carry_cursor([*before, *changed, *later], len(before))
    # Drop a past phase that began at this very step: the new one replaces it.
    ends = [*(p.start for p in phases[1:]), math.inf]
    return tuple(p for p, end in zip(phases, ends, strict=True) if p.start < end)


def skip_batches(past: Sequence[Phase], step: int, until: int) -> tuple[Phase, ...]:
    """Continue from `step` with the rows that follow update `until` - 1.

    Returns the phases up to `step`, with a last one that begins there: the `past` of
    change_phases, which moves the cursor on. A ramp of mask rates continues.
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
    """Return the fewest steps that cover `number` steps, examples, tokens or epochs.

    place(total) returns the phases of a run of `total` steps. Tokens are slots, padding
    included.
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
    """Return how many steps a duration takes at the beginning of a run, or at its end.

    total + 1 if the whole run is shorter.

    Worked example: 10 steps of 8 rows, then 10 of 32: 96 examples are 11 steps at the
    beginning and 3 at the end.
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
    """Return how many examples, token slots or epochs `total` steps cover."""
    ends = [*(p.start for p in phases[1:]), total]
    done = 0.0
    for phase, end in zip(phases, ends, strict=True):
        rows = max(min(end, total) - phase.start, 0) * phase.batch_size
        each = {"examples": 1, "tokens": phase.length, "epochs": 1 / phase.n}
        done += rows * each[unit]
    return done


def to_plain(phases: Iterable[Phase]) -> list[dict[str, Any]]:
    """Convert phases to the form that run.json and checkpoints store."""
    return [
        {k: v for k, v in asdict(p).items() if k != "ramp_start" or v is not None}
        for p in phases
    ]


def from_plain(records: Sequence[Mapping[str, Any]]) -> tuple[Phase, ...]:
    """Convert stored phases back."""
    return tuple(Phase(**p) for p in records)
