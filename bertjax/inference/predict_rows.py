# SPDX-License-Identifier: Apache-2.0
"""Predictions of a finetuned model for rows of its task."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.assembly import models, resolve
from bertjax.config import cli
from bertjax.data.progress import Progress
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.task_rows import Form, Rows
from bertjax.tasks.task_type import get_task_type, shipped_task_type

__all__ = ["Finetuned", "answer", "make_forward", "open_finetuned", "predict"]


class Finetuned(NamedTuple):
    """A finetuned model.

    threshold: by how much "no answer" must score better than an answer, or None.
    """

    config: Any
    objective: str
    form: Form
    tokenizer: Any
    params: Any
    threshold: float | None = None


def open_finetuned(
    path: str,
    dtype: str = "float32",
    weights: str = "",
    flag: str = "--model",
    columns: str = "",
    opened: models.LoadedModel | None = None,
) -> Finetuned:
    """Open a finetuned model. Raises UserError for one that was not finetuned.

    columns: the names of the text columns, comma-separated, if they differ from those
    in training. opened: the model, if it is loaded already.
    """
    config, tokenizer, checkpoint, meta = opened or models.open_model(path, flag)
    if "task" not in meta:
        raw = meta.get("hf", {})
        known = {k: raw[k] for k in ("architectures", "problem_type") if k in raw}
        about = f" ({', '.join(f'{k} {v}' for k, v in known.items())})" if known else ""
        raise UserError(
            f"{flag}={path} was not finetuned for a task that is known here{about}: "
            "fill_mask and embed use such models"
        )
    if get_task_type(config.objective).makes_vectors:
        raise UserError(
            f"{flag}={path} makes vectors, which bertjax.embed gives and "
            "bertjax.evaluate --what=retrieval scores"
        )
    config.dtype = dtype
    if columns:
        tasks.rename(config, columns)
    form = tasks.saved_form(config, meta)
    objective = tasks.with_head_options(config, form.labels)
    import jax

    shipped = shipped_task_type(config.objective)
    # A model that writes texts uses the head over the vocabulary, which may have no
    # parameters.
    is_own = shipped and not (shipped.generates or shipped.token_head)
    head = config.objective if is_own else ""
    params = jax.device_put(models.read_params(checkpoint, head, weights))
    threshold = meta["task"].get("threshold")
    return Finetuned(config, objective, form, tokenizer, params, threshold)


def answer(
    model: Finetuned, read: Sequence[Any], batch_size: int = 32
) -> Iterator[dict[str, Any]]:
    """Yield a model's prediction for each example, in order."""
    task_type = get_task_type(model.config.objective)
    rows = task_type.make_rows(read, model.form, model.tokenizer, False, cli.say)
    longest = resolve.encoder_config(model.config, 1).max_length
    rows = rows.plan(min(model.config.data.length, longest))
    if model.threshold is not None:
        # Rows have this field if their TaskType has has_threshold.
        threshold: dict[str, Any] = {"threshold": model.threshold}
        rows = dataclasses.replace(rows, **threshold)
    for line in (rows.read_as(model.tokenizer, labelled=False), *rows.notes()):
        cli.say(line)
    return rows.answers(predict(model, rows, batch_size), read)


def predict(
    model: Finetuned,
    rows: Rows,
    batch_size: int,
    run_model: Callable[[Any], dict[str, Any]] | None = None,
) -> dict[str, list[np.ndarray]]:
    """Return the head's outputs for each of the rows, in order: {name: [...]}.

    Rows are processed longest first, in a few shapes (forward.plan_batches).
    run_model(batch): computes the outputs instead of the model itself. Raises UserError
    for outputs that are not finite.
    """
    from bertjax.inference import forward
    from bertjax.objectives.base import TokenIds

    tokenizer = model.tokenizer
    cfg = resolve.encoder_config(model.config, tokenizer.vocab_size)
    writing = None
    if rows.writes:
        from bertjax.generation.answers import writing_of

        writing = writing_of(model.config)
    if run_model is None:
        how = TokenIds.of(tokenizer), writing, rows.candidates
        run = make_forward(model.objective, cfg, *how)
        params = model.params
        if tables := rows.tables:
            params = {**params, "tables": forward.place_tables(tables)}
        run_model = functools.partial(run, params)
    batch_size, planned = forward.plan_batches(rows.lengths(), batch_size, rows.length)

    @functools.cache
    def narrow(length: int) -> Rows:
        # All batches of a length share one, so that values it caches are computed once.
        return dataclasses.replace(rows, length=length)

    def batches() -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        for which, length in planned:
            filled = np.pad(which, (0, batch_size - len(which)), "edge")
            yield which, narrow(length).gather(filled, None, tokenizer)

    outputs: dict[str, list[Any]] = {}
    with Progress("predict", rows.n, "rows", forward.count_work(planned)) as progress:
        for which, arrays in forward.run_batches(batches(), run_model, progress):
            for name, values in arrays.items():
                if not np.isfinite(values).all():
                    raise UserError(f"the model's {name} are not finite numbers")
                out = outputs.setdefault(name, [None] * rows.n)
                for i, row in zip(which, values, strict=True):
                    out[i] = row
    return outputs


@functools.lru_cache(maxsize=8)
def make_forward(
    objective: str,
    cfg: Any,
    tokens: Any,
    writing: Any = None,
    candidates: Any = None,
) -> Callable[[Any, Any], dict[str, Any]]:
    """Return run(parameters, batch) -> the head's outputs, compiled once per shape.

    Equal arguments return the same function. tokens: the TokenIds of the tokenizer;
    writing: how texts are generated (generation/answers.py), None: they are not;
    candidates: those of the rows.
    """
    import jax

    from bertjax.inference import forward
    from bertjax.models.row_chunks import map_rows
    from bertjax.objectives.make_objective import make_objective

    whole, cfg = make_objective(objective, cfg, tokens, candidates=candidates)
    if writing is not None:
        from bertjax.generation.answers import with_texts

        whole = with_texts(whole, cfg, tokens, writing)
    evaluate = whole.evaluate
    assert evaluate is not None, f"{objective} has no outputs"

    @jax.jit
    def run(params: Any, batch: Any) -> dict[str, Any]:
        rows, *length = batch["input_ids"].shape
        chunks = forward.count_cpu_chunks(rows, math.prod(length))
        # evaluate also returns sums over labels. There are no labels here, and the
        # compiler removes the unused sums.
        return map_rows(lambda rows, number: evaluate(params, rows)[1], chunks, batch)

    return run
