# SPDX-License-Identifier: Apache-2.0
"""Compare the scores of a sweep's runs: their spread, the best run, and a report.

A row is an evaluation of a run: {"step", "seed", "lr", "valid", "skipped", "tokens"
(real tokens that the run has trained on), metric: value}; a value that was not finite
is None. Does not use jax.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from statistics import fmean, median, stdev
from typing import Any

from bertjax import UserError
from bertjax.checkpoints.best import GREATER, BestTracker, Known, find_best

# Keys of a row that are not metrics.
ABOUT = {"step", "seed", "lr", "valid", "skipped", "tokens"}


@dataclasses.dataclass
class SweepScores:
    """The evaluations of all runs so far, `rows`, and what follows from them.

    runs: (seed, rate) of each. metric: "eval/SET/METRIC", by which runs are compared:
    at their best evaluations if `at_best`, otherwise at their last ones. patience: a
    run ends after so many evaluations without a better one; None: never.
    greater_is_better: as for best.falls.
    """

    runs: Sequence[tuple[int, float]]
    metric: str
    at_best: bool
    patience: int | None
    greater_is_better: Known = dataclasses.field(default_factory=dict)
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        options = self.metric, self.patience, self.greater_is_better
        self.trackers = {run: BestTracker(*options) for run in self.runs}
        _, self.valid, self.metric = self.metric.split("/", 2)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add the rows of one evaluation, or of several in order."""
        self.rows += rows
        for row in rows:
            if row["valid"] == self.valid:
                self.trackers[row["seed"], row["lr"]].scores.append(self._score(row))

    def joined_to(
        self, rows: Sequence[dict[str, Any]], runs: Sequence[tuple[int, float]]
    ) -> "SweepScores":
        """Return the scores of all `runs`: these, and `rows` of another sweep."""
        metric = f"eval/{self.valid}/{self.metric}"
        joined = dataclasses.replace(self, runs=runs, metric=metric, rows=[])
        joined.add([*rows, *self.rows])
        return joined

    @property
    def ended(self) -> set[int]:
        """The indices in `runs` of those that have run out of patience."""
        over = [self.trackers[run].out_of_patience for run in self.runs]
        return {*itertools.compress(range(len(over)), over)}

    @property
    def step(self) -> int:
        """The step of the last evaluation; 0 before the first."""
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def counted(self) -> list[dict[str, Any]]:
        """The rows of each run's decisive evaluation, ordered by set and run."""
        steps = {}
        for run, tracker in self.trackers.items():
            best = tracker.step if self.at_best else None
            steps[run] = tracker.scores[-1][0] if best is None else best
        sets = [*dict.fromkeys(row["valid"] for row in self.rows)]
        rows = [r for r in self.rows if r["step"] == steps[r["seed"], r["lr"]]]
        places = {run: place for place, run in enumerate(self.runs)}
        return sorted(
            rows, key=lambda r: (sets.index(r["valid"]), places[r["seed"], r["lr"]])
        )

    @property
    def best(self) -> dict[str, Any] | None:
        """The best decisive row; ties go to the first step, then to the first run."""
        rows = [row for row in self.counted if row["valid"] == self.valid]
        scores = [*map(self._score, rows)]
        best = find_best(self.metric, scores, self.greater_is_better)
        return best and rows[scores.index((best.step, best.value))]

    def _score(self, row: dict[str, Any]) -> tuple[int, float]:
        value = row.get(self.metric)
        return row["step"], math.nan if value is None else value

    def summarize(self) -> dict[str, Any]:
        """Return the decisive scores, their spread, and the best run.

        Raises UserError if no run has a finite score.
        """
        best, rows = self.best, self.counted
        if best is None:
            raise UserError(
                f"{self.valid}'s {self.metric} is not finite in any run: take lower "
                "--lrs, or look at init_from"
            )
        steps = max(row["step"] for row in self.rows)
        facts = {"steps": steps, "metric": self.metric, "best": best}
        facts |= {"at": "best" if self.at_best else "end"}
        facts |= {GREATER: {**self.greater_is_better}}
        return facts | {"spread": spread(rows), "runs": rows, "curve": self.rows}


def spread(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the spread of rows for each validation set, rate and metric."""
    found = []
    pairs = dict.fromkeys((row["valid"], row["lr"]) for row in rows)
    for valid, rate in pairs:
        mine = [row for row in rows if (row["valid"], row["lr"]) == (valid, rate)]
        for key in sorted({key for row in mine for key in row} - ABOUT):
            key_values = {"valid": valid, "lr": rate, "metric": key}
            found.append(key_values | scatter([row.get(key) for row in mine]))
    return found


def scatter(values: Sequence[float | None]) -> dict[str, Any]:
    """Return n, median, mean, standard deviation (of n - 1; None for one) and extremes.

    They are those of the values that are not None, which n counts;
    `lost` counts the others.
    """
    known = [value for value in values if value is not None]
    how = {"median": median, "mean": fmean, "min": min, "max": max}
    found = {name: of(known) if known else None for name, of in how.items()}
    found["std"] = stdev(known) if len(known) > 1 else None
    return {"n": len(known), "lost": len(values) - len(known), **found}


def describe(found: dict[str, Any]) -> Iterator[str]:
    """Yield the report's lines for people."""
    head = f"{'set':12} {'lr':>8} {'metric':16} {'n':>3} {'median':>8} {'std':>8}"
    yield f"{head} {'min':>8} {'max':>8}"
    for row in found["spread"]:
        cells = {k: "-" if v is None else v for k, v in row.items()}
        cells |= {"std": "one seed"} if row["n"] == 1 and not row["lost"] else {}
        yield (
            f"{row['valid']:12} {row['lr']:8g} {row['metric']:16} {row['n']:3d} "
            + " ".join(
                f"{v:8.4f}" if isinstance(v, float) else f"{v:>8}"
                for v in (cells[k] for k in ("median", "std", "min", "max"))
            )
            + f"  {row['lost']} not finite" * bool(row["lost"])
        )
    first = found["best"]["valid"]
    for row in found["runs"]:
        if row["skipped"] and row["valid"] == first:
            skipped = f"{row['skipped']:,} of {row['step']:,} updates skipped (guard)"
            lost = row[found["metric"]] is None
            yield f"seed {row['seed']}, lr {row['lr']:g}: {skipped}" + ", lost" * lost
    best = found["best"]
    if found.get("at") == "best":
        yield "each run at its best evaluation (eval.best)"
    yield (
        f"best by {best['valid']}'s {found['metric']}: seed {best['seed']}, "
        f"lr {best['lr']:g}, step {best['step']:,}: {best[found['metric']]:.4f}, by "
        "this very score"
    )
