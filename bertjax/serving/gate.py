# SPDX-License-Identifier: Apache-2.0
"""Limit what a smaller model may lose: it is written only if its metric stays."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.assembly.models import LoadedModel
from bertjax.config import cli
from bertjax.data.tokenizers.vocab_files import read_lines
from bertjax.inference import predict_rows
from bertjax.serving.differences import Predict, make_batches
from bertjax.serving.served_model import ServedModel
from bertjax.storage.paths import expand

MOST = 0.005  # the share of the metric that may be lost
BATCH = 8
RATE = 0.15  # the share of tokens to mask for a masked LM
KEY = "--gate"


class Judged(NamedTuple):
    """A metric of the model and of its export, and the number of items it covers."""

    metric: str
    float32: float
    small: float
    count: int
    unit: str


class Masked(NamedTuple):
    """A masked batch, the true ids i32 [B, L], and the masked places bool [B, L]."""

    batch: Mapping[str, np.ndarray]
    ids: np.ndarray
    chosen: np.ndarray


class Gate(NamedTuple):
    """The rows by which a smaller model is judged, and score(predict) -> Judged."""

    rows: str
    score: Callable[[Predict], Judged]

    def check(self, predict: Predict, kind: str) -> dict[str, Any]:
        """Return what was judged; raise UserError if the metric falls too much.

        kind: that of the export's weights, in messages and in the result, which has the
        fields of Judged: {"metric": ..., "float32": 1.0, "uint8": 0.99, ...}.
        """
        found = self.score(predict)
        figures = (
            f"{found.metric} over {found.count:,} {found.unit} is {found.float32:.4f} "
            f"in float32, {found.small:.4f} in {kind}"
        )
        if not found.float32 > 0:
            raise UserError(f"{KEY}={self.rows}: {figures}: it judges nothing")
        if not found.small >= found.float32 * (1 - MOST):
            raise UserError(
                f"{KEY}={self.rows}: {figures}, which is more than {MOST:.1%} less: "
                "nothing is written"
            )
        cli.say(figures)
        return {kind if k == "small" else k: v for k, v in found._asdict().items()}


def open_gate(
    rows: str, model: LoadedModel, served: ServedModel, where: str, weights: str = ""
) -> Gate:
    """Read the rows by which a smaller model is judged. Raises UserError.

    rows: labeled rows of a finetuned model's task; for other models a file with one
    text per line. where: begins messages (--from=...).
    """
    if served.task == "fill-mask":
        batches = masked_batches(rows, model, served)
        return Gate(rows, functools.partial(masked_accuracy, batches, served))
    if served.sentences:
        texts = text_batches(rows, model, served)
        return Gate(rows, functools.partial(mean_cosine, texts, served))
    from bertjax.scoring.own import labelled_rows

    path = where.partition("=")[2]
    finetuned = predict_rows.open_finetuned(
        path, weights=weights, flag="--from", opened=model
    )
    sets = labelled_rows(finetuned, rows, KEY)
    return Gate(rows, functools.partial(task_metric, finetuned, sets))


def task_metric(
    finetuned: predict_rows.Finetuned, sets: Mapping[str, Any], predict: Predict
) -> Judged:
    """Score a finetuned model by the first metric of its config."""

    def run(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return outputs_of(finetuned.config.objective, predict(batch))

    totals, count, name = np.zeros(2), 0, ""
    for rows in sets.values():
        name, every = rows.scores[0], np.arange(rows.n)
        for i, how in enumerate((None, run)):
            outputs = predict_rows.predict(finetuned, rows, BATCH, how)
            totals[i] += rows.n * rows.score(outputs, every)[name]
        count += rows.n
    return Judged(name, *(totals / max(count, 1)).tolist(), count, "rows")


def outputs_of(
    objective: str, logits: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Convert served outputs to those that rows are scored by (TaskType.outputs)."""
    name = objective.partition(":")[0]
    if name == "span":
        return dict(logits)
    scores = logits["logits"]
    if name == "tag":
        odds = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return {"tags": scores.argmax(-1), "probability": 1 / odds.sum(axis=-1)}
    return {"scores": scores[:, 0] if name == "regress" else scores}


def read_texts(path: str) -> list[str]:
    """Return the non-empty lines of a file. Raises UserError."""
    where = f"{KEY}={path}"
    lines = [line for line in read_lines(expand(path, KEY), where) if line.strip()]
    if not lines:
        raise UserError(f"{where} has no texts")
    return lines


def text_batches(
    path: str, model: LoadedModel, served: ServedModel
) -> list[dict[str, np.ndarray]]:
    """Return the texts of a file in batches, ordered by length."""
    from bertjax.inference.embed_texts import tokenize

    prompt = served.sentences.prompt if served.sentences else ""
    lines = [prompt + line for line in read_texts(path)]
    rows, _ = tokenize(model.tokenizer, lines, served.longest)
    how = model.tokenizer.pad_id, BATCH, served.longest
    batches = make_batches(served, rows, *how)
    for batch in batches:
        if "token_type_ids" in batch:
            batch["token_type_ids"][:] = 0
    return batches


def masked_batches(path: str, model: LoadedModel, served: ServedModel) -> list[Masked]:
    """Mask some tokens of the texts of a file; masks are fixed. Raises UserError."""
    draws, tokenizer, batches = np.random.default_rng(0), model.tokenizer, []
    for batch in text_batches(path, model, served):
        ids = batch["input_ids"]
        special = np.isin(ids, tokenizer.special_ids)
        chosen = (batch["attention_mask"] > 0) & ~special
        chosen &= draws.random(ids.shape) < RATE
        given = {**batch, "input_ids": np.where(chosen, tokenizer.mask_id, ids)}
        batches.append(Masked(given, ids, chosen))
    if not any(batch.chosen.any() for batch in batches):
        raise UserError(f"{KEY}={path}: no token was masked: give more text")
    return batches


def masked_accuracy(
    batches: Sequence[Masked], served: ServedModel, predict: Predict
) -> Judged:
    """Score a masked LM by the share of masked tokens it predicts."""
    import jax

    run, params = jax.jit(served.run), jax.device_put(served.params)
    right, total = np.zeros(2), 0
    for given, ids, chosen in batches:
        for i, found in enumerate((jax.device_get(run(params, given)), predict(given))):
            right[i] += (found["logits"].argmax(-1) == ids)[chosen].sum()
        total += int(chosen.sum())
    return Judged("mlm_accuracy", *(right / total).tolist(), total, "masked tokens")


def mean_cosine(
    batches: Sequence[Mapping[str, np.ndarray]], served: ServedModel, predict: Predict
) -> Judged:
    """Score vectors by their cosines with the float32 model's, for which they are 1."""
    import jax

    run, params = jax.jit(served.run), jax.device_put(served.params)
    name, cosines = "sentence_embedding", []
    for batch in batches:
        a, b = jax.device_get(run(params, batch))[name], predict(batch)[name]
        sizes = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
        cosines += (np.sum(a * b, axis=-1) / np.maximum(sizes, 1e-12)).tolist()
    return Judged("cosine", 1.0, float(np.mean(cosines)), len(cosines), "texts")
