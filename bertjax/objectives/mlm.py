# SPDX-License-Identifier: Apache-2.0
"""Masked language modelling at the predicted positions only (Devlin et al. 2019)."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bertjax.models import heads
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import Encoded
from bertjax.models.layers import Params
from bertjax.objectives.base import Batch, Head, Sum
from bertjax.objectives.losses import cross_entropy
from bertjax.objectives.metrics import accuracy
from bertjax.parallel.sharding import size_along


def weights(batch: Batch) -> dict[str, jax.Array]:
    """Return the number of predicted positions, f32 []."""
    return {"mlm_loss": jnp.sum(batch["mlm_weights"])}


def sums(
    params: Params,
    cfg: EncoderConfig,
    encoded: Encoded,
    batch: Batch,
    rng: jax.Array | None,
) -> dict[str, Sum]:
    """Score mlm_ids [B, P] by hidden [B, P, D], the states at mlm_positions.

    Rows of weight 0 count for nothing. Raises ValueError for a head that is given
    something else.
    """
    b, p = batch["mlm_ids"].shape
    if encoded.hidden.shape[:2] != (b, p):
        raise ValueError(
            f"hidden has shape {encoded.hidden.shape}, mlm_ids {(b, p)}: the head "
            'needs reads="mlm_positions"'
        )

    def score(first: jax.Array | None, *arrays: jax.Array) -> tuple[Any, tuple[()]]:
        return score_predictions(params, cfg, *arrays)[0], ()

    arrays = encoded.hidden, batch["mlm_ids"], batch["mlm_weights"]
    return sum_in_chunks(score, cfg, arrays)[0]


def score_predictions(
    params: Params,
    cfg: EncoderConfig,
    hidden: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
) -> tuple[dict[str, Sum], jax.Array]:
    """Predict ids [B, P] from hidden [B, P, D]: loss, accuracy and f32 logits."""
    word = params["encoder"]["embeddings"]["word"]
    logits = heads.mlm_logits(params["mlm"], word, cfg, hidden)
    with jax.named_scope("mlm_loss"):
        loss = cross_entropy(logits, ids, weights)
        right = accuracy(logits, ids, weights)
    return {"mlm_loss": loss, "mlm_accuracy": right}, logits


def sum_in_chunks(
    score: Callable[..., tuple[Any, Any]],
    cfg: EncoderConfig,
    arrays: Sequence[jax.Array],
) -> tuple[Any, Any]:
    """Run score(first, *arrays) on as many of the P slots as cfg.max_logits_mb allows.

    arrays [B, P, ...], zeros in slots that fill up the last piece; first: the number of
    a piece's first slot, None where there is one piece. It returns (what is added up
    over pieces, what is kept of each slot, [B, w, ...]); so does this, [B, P, ...]. The
    backward pass makes the logits again.
    """
    b, p = arrays[0].shape[:2]
    pieces = count_chunks(cfg, -(-b // size_along("batch")), p)
    if pieces == 1:
        return score(None, *arrays)
    wide = -(-p // pieces)
    firsts = jnp.arange(0, pieces * wide, wide)
    parts = firsts, *(cut(x, pieces, wide) for x in arrays)

    def add(total: Any, part: Any) -> tuple[Any, Any]:
        terms, each = jax.checkpoint(score)(*part)
        return jax.tree.map(jnp.add, total, terms), each

    one = jax.eval_shape(score, *(x[0] for x in parts))[0]
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), one)
    total, each = jax.lax.scan(add, zeros, parts)

    def join(x: jax.Array) -> jax.Array:
        return x.swapaxes(0, 1).reshape(b, pieces * wide, *x.shape[3:])[:, :p]

    return total, jax.tree.map(join, each)


def cut(x: jax.Array, pieces: int, wide: int) -> jax.Array:
    """Cut x [B, P, ...] into pieces [pieces, B, wide, ...], zeros behind its end."""
    b, p, *rest = x.shape
    x = jnp.pad(x, ((0, 0), (0, pieces * wide - p), *((0, 0) for _ in rest)))
    return x.reshape(b, pieces, wide, *rest).swapaxes(0, 1)


def count_chunks(cfg: EncoderConfig, rows: int, predictions: int) -> int:
    """Return in how many pieces a device makes its logits, [rows, P, V] in f32."""
    if not cfg.max_logits_mb:
        return 1
    size = 4 * rows * predictions * cfg.vocab_size
    return min(predictions, -(-size // (cfg.max_logits_mb * 2**20)))


def make_head() -> Head:
    needs = frozenset({"mlm"})
    return Head("mlm", heads.init_mlm, weights, sums, "mlm_positions", needs)
