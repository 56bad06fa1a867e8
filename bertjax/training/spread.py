# SPDX-License-Identifier: Apache-2.0
"""How the scores of a sweep's runs scatter, which run is best, and lines that say so.

A row is a run's evaluation: {"step", "seed", "lr", "valid", "skipped", metric: value}.
No jax.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from bertjax import UserError
from bertjax.training.best import falls

ABOUT = "step", "seed", "lr", "valid", "skipped"  # of a row, beside its metrics


def summarise(
    scores: Sequence[dict[str, Any]],
    runs: Sequence[tuple[int, float]],
    total: int,
    name: str,
    metric: str,
) -> dict[str, Any]:
    """Return the last scores of every run, how they scatter, and which is best.

    name, metric: of the validation set and the metric that decide; of equal runs the
    first one is best. `bests` are the evaluations that eval.best would have kept: of
    each run that is not lost the best one, of equals the first. A score is None where
    it was not finite. Raises UserError where that one never was.
    """
    last = [row for row in scores if row["step"] == total]
    sign = 1 if falls(metric) else -1
    mine = [r for r in last if r["valid"] == name and r[metric] is not None]
    if not mine:
        raise UserError(
            f"{name}'s {metric} is not finite in any run: take lower --lrs, or look at "
            "init_from"
        )
    best = min(mine, key=lambda row: sign * row[metric])
    ends = [(row["seed"], row["lr"]) for row in mine]
    bests = [
        min(
            (
                row
                for row in scores
                if (row["seed"], row["lr"]) == end
                and row["valid"] == name
                and row[metric] is not None
            ),
            key=lambda row: sign * row[metric],
        )
        for end in ends
    ]
    spread = []
    for valid in dict.fromkeys(row["valid"] for row in last):
        for rate in dict.fromkeys(rate for _, rate in runs):
            rows = [r for r in last if r["valid"] == valid and r["lr"] == rate]
            for key in sorted({key for row in rows for key in row} - {*ABOUT}):
                values = [row.get(key) for row in rows]
                spread.append(
                    {"valid": valid, "lr": rate, "metric": key} | scatter(values)
                )
    facts = {"steps": total, "metric": metric, "best": best, "spread": spread}
    return facts | {"runs": last, "bests": bests, "curve": list(scores)}


def scatter(values: Sequence[float | None]) -> dict[str, Any]:
    """Return n, median, mean, standard deviation (of n - 1; None of one), extremes.

    Of the values that are not None, which n counts; `lost` are the others.
    """
    known = [value for value in values if value is not None]
    found: dict[str, Any] = {"n": len(known), "lost": len(values) - len(known)}
    names = "median", "mean", "min", "max"
    how = statistics.median, statistics.fmean, min, max
    for name, function in zip(names, how, strict=True):
        found[name] = function(known) if known else None
    return found | {"std": statistics.stdev(known) if len(known) > 1 else None}


def describe(found: dict[str, Any]) -> Iterator[str]:
    """Yield lines for people."""
    head = f"{'set':12} {'lr':>8} {'metric':16} {'n':>3} {'median':>8} {'std':>8}"
    yield f"{head} {'min':>8} {'max':>8}"
    for row in found["spread"]:
        told = {k: "-" if v is None else v for k, v in row.items()}
        told |= {"std": "one seed"} if row["n"] == 1 and not row["lost"] else {}
        yield (
            f"{row['valid']:12} {row['lr']:8.1e} {row['metric']:16} {row['n']:3d} "
            + " ".join(
                f"{v:8.4f}" if isinstance(v, float) else f"{v:>8}"
                for v in (told[k] for k in ("median", "std", "min", "max"))
            )
            + f"  {row['lost']} not finite" * bool(row["lost"])
        )
    first = found["best"]["valid"]
    for row in found["runs"]:
        if row["skipped"] and row["valid"] == first:
            told = f"{row['skipped']:,} of {found['steps']:,} updates skipped (guard)"
            lost = row[found["metric"]] is None
            yield f"seed {row['seed']}, lr {row['lr']:g}: {told}" + ", lost" * lost
    best = found["best"]
    yield (
        f"best by {best['valid']}'s {found['metric']}: seed {best['seed']}, "
        f"lr {best['lr']:g}: {best[found['metric']]:.4f}, by this very score"
    )
