# SPDX-License-Identifier: Apache-2.0
"""A class for each word, at its first piece (Devlin et al. 2019, section 5.3).

`labels` i32 [B, L] count where `label_weights` f32 [B, L] are 1: which position is a
word's first, the host says; nothing here looks at an id.
"""

import functools

import jax
import jax.numpy as jnp

from bertjax.models import heads
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import Encoded
from bertjax.models.layers import Params, fold_in
from bertjax.objectives.base import EVERYWHERE, Batch, Head, Sum
from bertjax.objectives.classify import KEY, row_weights
from bertjax.objectives.losses import cross_entropy


def word_weights(batch: Batch) -> jax.Array:
    """Return 1 for each word with a label, f32 [B, L]."""
    return batch["label_weights"] * row_weights(batch)[:, None]


def logits(
    params: Params, cfg: EncoderConfig, encoded: Encoded, rng: jax.Array | None = None
) -> jax.Array:
    """Return f32 logits [B, L, C]."""
    return heads.task_logits(params["tag"], cfg, encoded.hidden, fold_in(rng, KEY))


def weights(batch: Batch) -> dict[str, jax.Array]:
    """Return the number of labelled words, f32 []."""
    return {"tag_loss": jnp.sum(word_weights(batch))}


def sums(
    params: Params,
    cfg: EncoderConfig,
    encoded: Encoded,
    batch: Batch,
    rng: jax.Array | None,
) -> dict[str, Sum]:
    """Score the labels of the words."""
    scores = logits(params, cfg, encoded, rng)
    return {"tag_loss": cross_entropy(scores, batch["labels"], word_weights(batch))}


def outputs(
    params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch
) -> dict[str, jax.Array]:
    """Return the best class of every position, `tags` i32 [B, L], and its probability
    `probability` f32 [B, L], which is no number where the model is none."""
    scores = logits(params, cfg, encoded)
    tags = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    return {"tags": tags, "probability": jnp.max(jax.nn.softmax(scores), axis=-1)}


def labels(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Name the labels and label_weights [B, L] of a batch."""
    return {
        "labels": jax.ShapeDtypeStruct((rows, length), jnp.int32),
        "label_weights": jax.ShapeDtypeStruct((rows, length), jnp.float32),
    }


def make_head(classes: int = 2) -> Head:
    return Head(
        "tag",
        functools.partial(heads.init_task, classes=classes),
        weights,
        sums,
        reads=EVERYWHERE,
        task_type="tag",
        outputs=outputs,
        labels=labels,
    )
