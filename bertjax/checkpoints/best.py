# SPDX-License-Identifier: Apache-2.0
"""Which evaluation of a run was the best, and when a better one is waited for no more.

There is one truth, the rows of metrics.jsonl: a run that goes on and a command that
opens its workdir come to the same answer, whenever it was killed. No jax.
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
# Metrics of which less is better, unless a run knows more; of the others more is.
WORDS = "loss|perplexity|entropy|error|ece|brier|bits|cost|mse|mae|rank"
FALLING = re.compile(rf"(^|_)({WORDS})(_|@|$)")
NEVER = 2**62  # later than any step
GREATER = "greater_is_better"  # in run.json: {term: bool} of the objective's losses
Known = Mapping[str, bool]


class Best(NamedTuple):
    """The best value of a score, and the step of the first evaluation that had it."""

    metric: str
    step: int
    value: float

    def __str__(self) -> str:
        return f"step {self.step} is the best by {self.metric} ({self.value:.4f})"


def falls(metric: str, greater_is_better: Known = MappingProxyType({})) -> bool:
    """True for a metric of which less is better.

    greater_is_better: {term: bool} of the objective's losses, whatever their names are
    (run.json has it); what is not in it is told by its name.

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
    """Return what run.json says of losses: {} of runs of earlier versions."""
    found = facts.get(GREATER)
    return found if isinstance(found, dict) else {}


def full_metric_name(name: str, metrics: Mapping[str, Sequence[str]]) -> str:
    """Return the whole name of the score that config.eval.best asks for.

    name: "eval/SET/METRIC", or a metric of the first set; auto, or nothing, is its
    first metric. metrics: those of each set. Raises UserError.

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
    """Return the best of (step, value)s, of equals the first; None without a number.

    greater_is_better: as `falls` has it.

    >>> find_best("eval/v/accuracy", [(2, 0.5), (4, 0.75), (6, 0.75)]).step
    4
    """
    known = [(step, value) for step, value in scores if math.isfinite(value)]
    if not known:
        return None
    sign = 1 if falls(metric, greater_is_better) else -1
    return Best(metric, *min(known, key=lambda score: (sign * score[1], score[0])))


def read(path: Any, metric: str, until: int = NEVER) -> list[tuple[int, float]]:
    """Return (step, value), nan where not finite, of a metric up to a step."""
    found = []
    for line in rows_up_to(path / "metrics.jsonl", until, f'"{metric}"'):
        row = json.loads(line)
        value = row.get(metric, math.nan)
        found.append((row["step"], math.nan if value is None else float(value)))
    return found


def best_saved(path: Any, steps: Sequence[int]) -> Best | None:
    """Return the best of the evaluations of these steps; None: none was looked for."""
    facts = read_json(path / "run.json")
    metric = facts.get("best", {}).get("metric")
    if not metric:
        return None
    scores = [score for score in read(path, metric) if score[0] in steps]
    return find_best(metric, scores, known_directions(facts))


@dataclasses.dataclass
class BestTracker:
    """The evaluations of a run until now: `scores`, a (step, value) each.

    metric: the whole name of the score that counts; "" where none does. patience: so
    many evaluations without a better one end the run; None: none do.
    greater_is_better: as `falls` has it.
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
        """The step of the best evaluation, where there is one."""
        found = self.best
        return found.step if found else None

    @property
    def out_of_patience(self) -> bool:
        """True where the last `patience` evaluations were no better than one before."""
        if self.patience is None:
            return False
        best = self.step or 0  # looked for once: a long run has thousands of scores
        return sum(step > best for step, _ in self.scores) >= self.patience

    @property
    def facts(self) -> dict[str, Any]:
        """What run.json and checkpoints say: {"best": {"metric", "step", "value"}}."""
        found = self.best and self.best._asdict()
        return {"best": found or {"metric": self.metric}} if self.metric else {}
