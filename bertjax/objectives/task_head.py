# SPDX-License-Identifier: Apache-2.0
"""Build the heads of labeled tasks, and the weights of rows and tokens."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bertjax.models import heads
from bertjax.models.layers import fold_in
from bertjax.objectives.base import EVERYWHERE, NOWHERE, Batch, Head, Labels, Sum
from bertjax.objectives.teacher import Soft
from bertjax.parallel.sharding import TEACHER

# Folded into the key of the head's dropout; layers fold in their numbers, all smaller.
KEY = 2**20


def row_weights(batch: Batch) -> jax.Array:
    """Return 1 for each row, f32 [B], and 0 for rows that pad the last batch."""
    rows = batch["input_ids"].shape[:1]
    return batch.get("example_weights", jnp.ones(rows, jnp.float32))


def weights_of(name: str, batch: Batch) -> jax.Array:
    """Return the weights batch[name] [B, S], f32, with 0 in rows that pad the batch."""
    return batch[name].astype(jnp.float32) * row_weights(batch)[:, None]


def real_tokens(batch: Batch) -> jax.Array:
    """Return 1 for each real token, [CLS] and [SEP] included, f32 [B, L]."""
    return weights_of("attention_mask", batch)


def arrays(**axes_and_dtypes: tuple[str, Any]) -> Labels:
    """Make Head.labels for arrays given as (axes, dtype).

    The axes are a string of "B", rows, and "L", tokens: "B" or "BL".
    """

    def labels(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        sizes = {"B": rows, "L": length}
        return {
            name: jax.ShapeDtypeStruct(tuple(sizes[axis] for axis in axes), dtype)
            for name, (axes, dtype) in axes_and_dtypes.items()
        }

    return labels


def make_task_head(
    name: str,
    classes: int,
    loss: Callable[[jax.Array, Batch], Sum],
    outputs: Callable[[jax.Array, Batch], dict[str, jax.Array]],
    labels: Labels,
    weights: Callable[[Batch], jax.Array] = row_weights,
    of_tokens: bool = False,
    dropout: bool = True,
    soft: Soft | None = None,
    has_loss: Callable[[Batch], bool] = lambda batch: True,
) -> Head:
    """Make the head of a task; its loss is the term NAME_loss.

    loss(logits, batch) and outputs(logits, batch) receive f32 logits, [B, C] of the
    pooled vectors or, if of_tokens, [B, L, C] of the hidden states. weights(batch): the
    weights of the loss, of any shape. dropout: whether the classifier's input gets
    dropout. soft: the loss against a teacher, if there is one. has_loss: whether a
    batch has the arrays of the loss; False for rows that are only scored.
    """
    taught = soft and soft.teacher and soft.teacher.pooled(not of_tokens)
    terms = [f"{name}_loss", *[f"{name}_kl_loss"] * bool(taught)]

    def logits(params, cfg, encoded, rng=None):
        vectors = encoded.hidden if of_tokens else encoded.pooled
        return heads.task_logits(params[name], cfg, vectors, rng)

    def all_weights(batch):
        return dict.fromkeys(terms, jnp.sum(weights(batch))) if has_loss(batch) else {}

    def sums(params, cfg, encoded, batch, rng):
        if not has_loss(batch):
            return {}
        rng = fold_in(rng, KEY) if dropout else None
        own = logits(params, cfg, encoded, rng)
        found = {f"{name}_loss": loss(own, batch)}
        if taught:
            theirs = taught.encode(params, batch)
            known = logits(params[TEACHER], taught.cfg, theirs)
            args = own, known, batch, soft.temperature
            found[f"{name}_kl_loss"] = soft.loss(*args)
        return found

    def evaluate(params, cfg, encoded, batch):
        return outputs(logits(params, cfg, encoded), batch)

    init = functools.partial(heads.init_task, classes=classes)
    return Head(
        name,
        init,
        all_weights,
        sums,
        reads=EVERYWHERE if of_tokens else NOWHERE,
        pooled=not of_tokens,
        outputs=evaluate,
        labels=labels,
        task_type=name,
        coefficients=soft.coefficients(name) if soft else {},
        flops=taught and taught.head_flops,
        init_teacher=taught and (lambda rng: taught.init(rng, **{name: init})),
    )
