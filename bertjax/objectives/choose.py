# SPDX-License-Identifier: Apache-2.0
"""Multiple choice: predict which choice is right (Devlin et al. 2019, section 4.4).

A batch has input_ids, attention_mask, token_type_ids i32 [B, C, L], one sequence per
choice; choice_weights f32 [B, C], 0 for choices that an example lacks; labels i32 [B].
The score of a choice is the inner product of its pooled vector with a learned vector;
the loss is the cross-entropy of a softmax over the choices of an example.
"""

import functools

import jax
import jax.numpy as jnp

from bertjax import UserError
from bertjax.objectives.base import SEQUENCES, Batch, Head, Sum
from bertjax.objectives.losses import cross_entropy
from bertjax.objectives.task_head import make_task_head, row_weights

ABSENT = -1e9  # the logit of a choice that an example lacks


def scores(logits: jax.Array, batch: Batch) -> jax.Array:
    """Return the scores of the choices, f32 [B, C], from logits [B C, 1]."""
    is_real = batch["choice_weights"] > 0
    return jnp.where(is_real, logits.reshape(is_real.shape), ABSENT)


def loss(logits: jax.Array, batch: Batch) -> Sum:
    """Return the cross-entropy of the labels, i32 [B]."""
    return cross_entropy(scores(logits, batch), batch["labels"], row_weights(batch))


def outputs(logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """Return the `scores` of the choices, f32 [B, C]."""
    return {"scores": scores(logits, batch)}


def labels(choices: int, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Describe the arrays of a batch with `choices` choices per row.

    Raises UserError for 0 choices.
    """
    if not choices:
        raise UserError(
            "objective=choose: how many choices a row has is not known; preflight "
            "takes it from data.train, and benchmark too from task.choices where that "
            "names a column for each; else say --config.objective=choose:choices=4"
        )
    each = dict.fromkeys(SEQUENCES, ((choices, length), jnp.int32))
    each |= {"choice_weights": ((choices,), jnp.float32), "labels": ((), jnp.int32)}
    return {k: jax.ShapeDtypeStruct((rows, *n), kind) for k, (n, kind) in each.items()}


def make_head(choices: int = 0) -> Head:
    """Make the head; the encoder sees each choice as a row.

    choices: per row, in batches that are made up; other batches show it by their shape.
    """
    own = functools.partial(labels, choices)
    return make_task_head("choose", 1, loss, outputs, own)
