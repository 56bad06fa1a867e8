# SPDX-License-Identifier: Apache-2.0
"""The best evaluation of a run, and early stopping.

The only source is the rows of metrics.jsonl, so a resumed run and a command that opens
its workdir get the same answer, whenever the run was killed. This module needs no jax.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from bertjax import registry
from bertjax.checkpoints.workdir import read_json, rows_up_to

AUTO = "auto"
# Metrics whose names have these words are better when lower, unless the run says
# otherwise; all others are better when higher.
WORDS = "loss|perplexity|entropy|error|ece|brier|bits|cost|mse|mae|rank"
FALLING = re.compile(rf"(^|_)({WORDS})(_|@|$)")
MAX_STEP = 2**62  # later than any step
GREATER = "greater_is_better"  # in run.json: {term: bool} of the objective's losses
Known = Mapping[str, bool]


class Best(NamedTuple):
    """The best value of a metric, and the step of the first evaluation with it."""

    metric: str
    step: int
    value: float

    def __str__(self) -> str:
        return f"step {self.step} is the best by {self.metric} ({self.value:.4f})"


def falls(metric: str, greater_is_better: Known = MappingProxyType({})) -> bool:
    """Return True for a metric that is better when lower.

    greater_is_better: {term: bool} of the objective's losses, whatever their names are
    (from run.json); other metrics are judged by their names.

    >>> falls("eval/valid/mlm_loss"), falls("eval/loss/accuracy")
    (True, False)
    >>> falls("eval/valid/contrast", {"contrast": False})
    True
    """
    term = metric.rpartition("/")[2]
    if term in greater_is_better:
        return not greater_is_better[term]
    return bool(FALLING.search(term))


def known_directions(facts: Mapping[str, Any]) -> Known:
    """Return greater_is_better from run.json; {} for runs of earlier versions."""
    found = facts.get(GREATER)
    return found if isinstance(found, dict) else {}


def full_metric_name(name: str, metrics: Mapping[str, Sequence[str]]) -> str:
    """Return the full name of the metric that config.eval.best selects.

    name: "eval/SET/METRIC", or a metric of the first set; "auto" or "" selects the
    first set's first metric. metrics: the metrics of each set. Raises UserError for an
    unknown metric.

    >>> full_metric_name("f1", {"dev": ["accuracy", "f1"]})
    'eval/dev/f1'
    """
    first = next(iter(metrics))
    name = metrics[first][0] if name in ("", AUTO) else name
    name = name if "/" in name else f"eval/{first}/{name}"
    known = [f"eval/{each}/{one}" for each, names in metrics.items() for one in names]
    return registry.pick("eval.best", name, {k: k for k in known})


def find_best(
    metric: str,
    scores: Sequence[tuple[int, float]],
    greater_is_better: Known = MappingProxyType({}),
) -> Best | None:
    """Return the best of (step, value) pairs, the earliest of equals.

    Returns None if no value is finite. greater_is_better: as in `falls`.

    >>> find_best("eval/v/accuracy", [(2, 0.5), (4, 0.75), (6, 0.75)]).step
    4
    """
    known = [(step, value) for step, value in scores if math.isfinite(value)]
    if not known:
        return None
    sign = 1 if falls(metric, greater_is_better) else -1
    return Best(metric, *min(known, key=lambda score: (sign * score[1], score[0])))


def read(path: Any, metric: str, until: int = MAX_STEP) -> list[tuple[int, float]]:
    """Return (step, value) pairs of a metric up to a step; nan if not finite."""
    found = []
    for line in rows_up_to(path / "metrics.jsonl", until, f'"{metric}"'):
        row = json.loads(line)
        value = row.get(metric, math.nan)
        found.append((row["step"], math.nan if value is None else float(value)))
    return found


def best_saved(path: Any, steps: Sequence[int]) -> Best | None:
    """Return the best evaluation at these steps; None if the run tracked no best."""
    facts = read_json(path / "run.json")
    metric = facts.get("best", {}).get("metric")
    if not metric:
        return None
    scores = [score for score in read(path, metric) if score[0] in steps]
    return find_best(metric, scores, known_directions(facts))


@dataclasses.dataclass
class BestTracker:
    """Tracks the evaluations of a run: `scores` has a (step, value) for each.

    metric: the full name of the metric that decides; "" for none. patience: the number
    of evaluations without a better one that ends the run; None: never.
    greater_is_better: as in `falls`.
    """

    metric: str
    patience: int | None
    greater_is_better: Known = dataclasses.field(default_factory=dict)
    scores: list[tuple[int, float]] = dataclasses.field(default_factory=list)

    @property
    def best(self) -> Best | None:
        return find_best(self.metric, self.scores, self.greater_is_better)

    @property
    def step(self) -> int | None:
        """The step of the best evaluation, or None."""
        found = self.best
        return found.step if found else None

    @property
    def out_of_patience(self) -> bool:
        """Whether the last `patience` evaluations brought nothing better."""
        if self.patience is None:
            return False
        best = self.step or 0  # computed once: a long run has thousands of scores
        return sum(step > best for step, _ in self.scores) >= self.patience

    @property
    def facts(self) -> dict[str, Any]:
        """The entry of run.json and checkpoints: {"best": {"metric", ...}}."""
        found = self.best and self.best._asdict()
        return {"best": found or {"metric": self.metric}} if self.metric else {}
