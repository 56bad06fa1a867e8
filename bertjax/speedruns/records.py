# SPDX-License-Identifier: Apache-2.0
"""Measure the runs of a speedrun, and compare several of them.

A record describes one seed's run: {"seed", "steps", "tokens", "passes", "minutes",
"wall", "processor", "parameters", "loss", "right", "pairs", ...}. It is written into
the run's workdir.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertjax import UserError
from bertjax.checkpoints import workdir
from bertjax.speedruns.tracks import PASSES, Track

FILE = "speedrun.json"  # in the workdir of a run, and of all runs of an entry
P = 0.01  # the p-value at which a target is reached, or an entry is better
SEEDS = 3  # the least number of seeds for that
SCORES = {"loss": "less", "pairs": "greater"}  # the direction that is better
Record = Mapping[str, Any]


def passes_of(phases: Sequence[Mapping[str, Any]], total: int) -> float:
    """Count the passes over the text: the rows of each phase over those of an epoch.

    >>> one = {"start": 0, "batch_size": 8, "n": 800}
    >>> passes_of([one, {"start": 50, "batch_size": 4, "n": 200}], 100)
    1.5
    """
    ends = [phase["start"] for phase in phases[1:]] + [total]
    parts = zip(phases, ends, strict=True)
    return sum((end - p["start"]) * p["batch_size"] / p["n"] for p, end in parts)


def is_record(found: Any) -> bool:
    """Return whether a value has the times and scores of a run, as finite numbers."""
    names = ("seed", "minutes", "tokens", "passes", "right", *SCORES)
    return isinstance(found, dict) and all(
        isinstance(found.get(name), int | float) and math.isfinite(found[name])
        for name in names
    )


def measure(path: Path, track: Track) -> dict[str, Any]:
    """Return what a finished run used: steps, tokens, passes over the text, minutes.

    Raises UserError if it broke a rule.
    """
    run = workdir.read_json(path / "run.json")
    total = run["total_steps"]
    lines = workdir.rows_up_to(path / "metrics.jsonl", total)
    rows = [json.loads(line) for line in lines]
    minutes = workdir.minutes_of(rows)
    timed = [row["step"] for row in rows if "perf/step_seconds" in row]
    if timed[-1:] != [total]:
        raise UserError(
            f"{path}/metrics.jsonl lacks the time of the updates up to step {total}, "
            "without which the run is no entry"
        )
    passes = passes_of(run["phases"], total)
    if passes > PASSES:
        raise UserError(
            f"{path}: {passes:.1f} passes over the text, and the rules of the speedrun "
            f"allow {PASSES}: give a smaller --config.total.steps"
        )
    starts = run["starts"]
    return {
        "steps": total,
        "tokens": rows[-1]["tokens"],
        "passes": passes,
        "minutes": minutes[track.clock],
        **minutes,
        "parameters": run["parameters"],
        "device": run["device_kind"],
        "devices": run["devices"],
        "git": run["git"],
        "versions": starts[-1]["versions"],
    }


def summarize(records: Sequence[Record], track: Track) -> dict[str, Any]:
    """Return each score's mean and spread over seeds, and whether targets are met.

    reached: whether the mean is better than the track's target with p < 0.01, by
    a one-sided t test over the seeds; None for fewer than SEEDS, without a
    target, or if p is unknown.
    """
    found: dict[str, Any] = {"seeds": [record["seed"] for record in records]}
    for name in ("minutes", "tokens", "passes", "loss", "right", "pairs"):
        values = [record[name] for record in records]
        found[name] = {"mean": statistics.fmean(values)}
        if len(values) > 1:
            found[name]["std"] = statistics.stdev(values)
    for name, better in SCORES.items():
        target = getattr(track, name)
        found[name]["target"] = target
        values = [record[name] for record in records]
        p = None if target is None else p_against(values, target, better)
        few = p is None or len(values) < SEEDS
        found[name] |= {"p": p, "reached": None if few else p < P}
    found["in_time"] = found["minutes"]["mean"] <= track.minutes
    return found


def p_against(values: Sequence[float], target: float, better: str) -> float | None:
    """Return the p-value of the mean being no better than a number.

    None if the values have no spread: a single one, or all equal.
    """
    from scipy import stats

    if len({*values}) < 2:
        return None
    return float(stats.ttest_1samp(values, target, alternative=better).pvalue)


def compare(ours: Sequence[Record], theirs: Sequence[Record]) -> dict[str, Any]:
    """Return each score's difference of means and p-value (Welch's t test).

    The p-value is one-sided, for ours being no better; None if neither side has a
    spread. `minutes` has the difference only. Raises UserError for a single seed.
    """
    from scipy import stats

    check_seeds(len(ours), len(theirs))
    mine, other = (
        statistics.fmean(r["minutes"] for r in side) for side in (ours, theirs)
    )
    found: dict[str, Any] = {"minutes": {"difference": mine - other}}
    for name, better in SCORES.items():
        a, b = ([record[name] for record in side] for side in (ours, theirs))
        difference, p = statistics.fmean(a) - statistics.fmean(b), None
        if len({*a}) > 1 or len({*b}) > 1:
            test = stats.ttest_ind(a, b, equal_var=False, alternative=better)
            p = float(test.pvalue)
        found[name] = {"difference": difference, "p": p}
    return found


def check_seeds(ours: int, theirs: int) -> None:
    """Refuse a comparison in which a side has a single seed. Raises UserError."""
    if min(ours, theirs) < 2:
        raise UserError(
            f"--against compares runs of several seeds, and these are {ours} and "
            f"{theirs}: give --seeds=3"
        )


def read_records(path: Path, flag: str, track: str) -> list[dict[str, Any]]:
    """Return the records of an entry of a track. Raises UserError."""
    found = workdir.read_json(path / FILE)
    records = found.get("records")
    if not (isinstance(records, list) and records and all(map(is_record, records))):
        raise UserError(f"{flag}={path}: there is no {FILE} with whole records in it")
    if (other := found.get("track")) != track:
        raise UserError(
            f"{flag}={path} is an entry of --track={other}, and this one is of {track}"
        )
    return records


def describe(name: str, track: Track, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that report what an entry used and reached."""

    def value(key: str, digits: int, times: float = 1.0) -> str:
        of = found[key]
        text = f"{times * of['mean']:,.{digits}f}"
        return text + (f" ± {times * of['std']:.{digits}f}" if "std" in of else "")

    seeds = ", ".join(map(str, found["seeds"]))
    yield f"track {name}, {track.needs}, at most {track.budget}; seeds {seeds}:"
    over = "" if found["in_time"] else ", which is more than the track has"
    yield f"  minutes        {value('minutes', 1)}{over}"
    yield f"  tokens         {value('tokens', 0)}, {value('passes', 2)} passes"
    yield f"  held-out loss  {value('loss', 3)}{verdict(found['loss'], '{:.3f}', 1)}"
    yield f"  right          {value('right', 1, 100)}%"
    yield f"  minimal pairs  {value('pairs', 1, 100)}%" + verdict(
        found["pairs"], "{:.1f}%", 100
    )


def verdict(score: Mapping[str, Any], form: str, times: float) -> str:
    """Describe whether a target is reached."""
    if score["target"] is None:
        return ""
    target = form.format(times * score["target"])
    if score["p"] is None and "std" in score:
        return f" (the target is {target}; equal scores show nothing)"
    if score["reached"] is None:
        return f" (the target is {target}; fewer than {SEEDS} seeds show nothing)"
    what = "reached" if score["reached"] else "not shown to be reached"
    return f" (the target, {target}, is {what}: p = {score['p']:.2g})"
