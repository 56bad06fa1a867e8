# SPDX-License-Identifier: Apache-2.0
"""Score a model as its training does: by its objective's losses, or by its task."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.assembly import models, resolve
from bertjax.config import cli
from bertjax.data.corpus.sources import named_sources
from bertjax.inference import predict_rows
from bertjax.scoring import mlm, retrieval
from bertjax.scoring.scorer import Scores, scores_of_sets, text_to_score
from bertjax.tasks.task_rows import Rows, check_label
from bertjax.tasks.task_type import find_task_type, get_task_type

FLAGS = ("examples", "columns", "label")


def score(args: Any, path: str, flag: str) -> Scores:
    """Score a model by its objective's or its task's own measures."""
    opened = config, _, checkpoint, meta = models.open_model(path, flag)
    task_type = find_task_type(config.objective)
    retrieves = task_type is not None and task_type.makes_vectors
    finetuned = "task" in meta
    if finetuned and args.examples is not None:
        raise UserError(
            "--examples has no effect with a finetuned model, whose task is scored on "
            "all rows: leave it out"
        )
    if finetuned and not retrieves:
        return score_task(args, path, flag, opened)
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


def score_task(args: Any, path: str, flag: str, opened: models.LoadedModel) -> Scores:
    """Score all rows of each validation set of --text or the run's data.valid."""
    for name in ("columns", "label"):
        if args[name].value == "":
            raise UserError(f"--{name} is empty: give the name of a column")
    model = predict_rows.open_finetuned(
        path, args.dtype, args.weights, flag, args.columns or "", opened
    )
    if args.label:
        model = model._replace(form=model.form._replace(label=args.label))
    check_label(model.form.keys(flags=True))
    text, key = text_to_score(args, model.config)
    if get_task_type(model.config.objective).masks:
        sets = score_masked(model, labelled_rows(model, text, key), args.batch_size)
        return scores_of_sets(sets, args, opened[-1])
    sets = {}
    for name, rows in labelled_rows(model, text, key).items():
        outputs = predict_rows.predict(model, rows, args.batch_size or 32)
        every = np.arange(rows.n)
        sets[name] = {**rows.score(outputs, every), **rows.parts(outputs, every)}
    return scores_of_sets(sets, args, opened[-1])


def score_masked(
    model: predict_rows.Finetuned, sets: Mapping[str, Rows], batch_size: int | None
) -> dict[str, dict[str, float]]:
    """Return losses and metrics of sets whose rows a host half masks.

    They are those of evaluations during training.
    """
    import jax

    from bertjax.assembly import batches as run_batches
    from bertjax.objectives.base import TokenIds
    from bertjax.objectives.make_objective import make_objective
    from bertjax.training import step

    config, tokenizer = model.config, model.tokenizer
    cfg = resolve.encoder_config(config, tokenizer.vocab_size)
    objective = make_objective(model.objective, cfg, TokenIds.of(tokenizer))[0]
    how = objective.sums, objective.weights, objective.evaluate
    evaluate = jax.jit(step.make_eval_step(*how))
    found = {}
    for name, rows in sets.items():
        tables = run_batches.make_tables(config, tokenizer, rows.counts)
        fixed = config, objective.needs, tokenizer, name, rows, tables
        batches = run_batches.make_eval_batches(*fixed)
        outputs: list[Any] = []
        fed: Any = batches.eval_batches(batch_size or 32)
        values = step.run_eval(evaluate, model.params, fed, outputs=outputs) or {}
        found[name] = values | batches.score(outputs, None)
    return found


def labelled_rows(
    model: predict_rows.Finetuned, text: str, key: str
) -> dict[str, Rows]:
    """Return the labeled rows of each set that `text` names; key: begins messages.

    Raises UserError for files that the model's task cannot read.
    """
    task_type = get_task_type(model.config.objective)
    columns = model.form.keys(flags=True)
    sets = {}
    for name, part in named_sources(text, key).items():
        examples = task_type.read(part, key, columns, cli.say)
        rows = task_type.make_rows(examples, model.form, model.tokenizer, True, cli.say)
        rows = rows.for_scores().plan(model.config.data.length)
        cli.say(f"{name}: {rows.read_as(model.tokenizer)}")
        sets[name] = rows
    return sets
