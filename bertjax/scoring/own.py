# SPDX-License-Identifier: Apache-2.0
"""Score a model as its own training does: the losses of its objective, or its task."""

from typing import Any

from bertjax import UserError
from bertjax.assembly import models
from bertjax.scoring import mlm, retrieval, task
from bertjax.scoring.scorer import Scores
from bertjax.tasks.task_type import find_task_type

FLAGS = ("examples", "columns", "label")


def score(args: Any, path: str, flag: str) -> Scores:
    """Score by the scorer that the model's objective has."""
    opened = config, _, checkpoint, meta = models.open_model(path, flag)
    task_type = find_task_type(config.objective)
    retrieves = task_type is not None and task_type.makes_vectors
    finetuned = "task" in meta
    if finetuned and args.examples is not None:
        raise UserError(
            "--examples has no use with a finetuned model, whose task is scored on all "
            "rows: leave it out"
        )
    if finetuned and not retrieves:
        return task.score_opened(args, path, flag, opened)
    for name in ("label",) if retrieves else ("columns", "label"):
        if getattr(args, name) is not None:
            raise UserError(
                f"--{name} names a column of a finetuned model's table, and this model "
                "was not finetuned on one: leave it out"
            )
    if retrieves:
        return retrieval.score(args, str(checkpoint) if finetuned else path, flag)
    if args.examples is not None or args.text:
        config.eval.examples = args.examples or 0
    head = "mlm" if "mlm" in config.objective.split("+") else ""
    return mlm.score_rows(args, opened, head, layout="own")
