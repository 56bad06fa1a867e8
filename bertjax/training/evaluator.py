# SPDX-License-Identifier: Apache-2.0
"""Scores of parameters on the validation sets of a run."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bertjax.training import step


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Scores parameters on validation sets.

    evaluate_fn(params, batch) -> sums (step.make_eval_step), jitted. sets: by name,
    with eval_batches and score (data/batches.py). open(batches) -> the same on the
    devices. is_late: True some seconds after a signal; the result is then None.

    evaluator(params) -> {set: {term: value}}.
    """

    evaluate_fn: Callable[[Any, Any], step.Sums]
    sets: Mapping[str, Any]
    batch_size: int
    examples: int | None
    rows: Any
    open: Callable[[Any], Iterator[Any]]
    is_late: Callable[[], bool]

    def __call__(self, params: Any) -> dict[str, dict[str, float]] | None:
        found = {}
        for name, rows in self.sets.items():
            batches = rows.eval_batches(self.batch_size, self.examples, self.rows)
            outputs: list[Any] = []
            values = step.run_eval(
                self.evaluate_fn, params, self.open(batches), self.is_late, outputs
            )
            if values is None:
                return None
            scores = rows.score(outputs, self.examples) if outputs else {}
            found[name] = values | scores
        return found
