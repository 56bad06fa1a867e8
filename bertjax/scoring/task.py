# SPDX-License-Identifier: Apache-2.0
"""Score a finetuned model by the metrics of its task."""

from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.assembly import models
from bertjax.config import cli
from bertjax.data.corpus.sources import named_sources
from bertjax.inference import predict_rows
from bertjax.scoring.scorer import Scores, scores_of_sets
from bertjax.tasks.task_rows import check_label
from bertjax.tasks.task_type import get_task_type


def score_opened(args: Any, path: str, flag: str, opened: models.LoadedModel) -> Scores:
    """Score all rows of each validation set, of --text or of the run's data.valid."""
    for name in ("columns", "label"):
        if args[name].value == "":
            raise UserError(f"--{name} is empty: give the name of a column")
    model = predict_rows.open_finetuned(
        path, args.dtype, args.weights, flag, args.columns or "", opened
    )
    if args.label:
        model = model._replace(form=model.form._replace(label=args.label))
    columns = model.form.keys(flags=True)
    check_label(columns)
    if not args.text and not model.config.data.valid:
        raise UserError("data.valid is empty in this model's config: give --text=FILES")
    task_type = get_task_type(model.config.objective)
    key = "--text" if args.text else "data.valid"
    sets = {}
    for name, part in named_sources(args.text or model.config.data.valid, key).items():
        examples = task_type.read(part, key, columns, cli.say)
        rows = task_type.make_rows(
            examples, model.form, model.tokenizer, True, cli.say
        ).plan(model.config.data.length)
        cli.say(f"{name}: {rows.read_as(model.tokenizer)}")
        outputs = predict_rows.predict(model, rows, args.batch_size or 32)
        every = np.arange(rows.n)
        sets[name] = {**rows.score(outputs, every), **rows.parts(outputs, every)}
    return scores_of_sets(sets, args, opened[-1])
