# SPDX-License-Identifier: Apache-2.0
"""Losses as (sum, weight). The training step divides once, by the global weight."""

import jax
import jax.numpy as jnp

from bertjax.objectives.base import Sum


def cross_entropy(logits: jax.Array, ids: jax.Array, weights: jax.Array) -> Sum:
    """Sum weighted negative log-likelihoods, in nats.

    logits f32 [..., V]; ids i32 [...]; weights f32 [...]. Ids with a weight other than
    0 must be in range. Raises ValueError if shapes do not fit.
    """
    check_shapes(logits, ids, weights)
    *_, norm = exponentials(logits)
    return Sum(jnp.sum(weights * (norm - logits_of(logits, ids))), jnp.sum(weights))


def exponentials(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return e = exp(logits - their maximum) f32 [..., V], the sum of e over V, f32
    [...], and logsumexp(logits), f32 [...]. The softmax is e divided by that sum."""
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    e = jnp.exp(logits - peak[..., None])
    total = jnp.sum(e, axis=-1)
    return e, total, peak + jnp.log(total)


def logits_of(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the logit of each id, f32 [...]; logits [..., V], ids i32 [...]."""
    return jnp.take_along_axis(logits, ids[..., None], axis=-1, mode="clip")[..., 0]


def z_loss_of(logits: jax.Array, weights: jax.Array) -> Sum:
    """Sum the weighted squares of logsumexp(logits), a penalty that keeps it near 0.

    Shapes as in `cross_entropy`. (Chowdhery et al. 2022, PaLM, section 5.)
    """
    norm = jax.nn.logsumexp(logits, axis=-1)
    return Sum(jnp.sum(weights * norm**2), jnp.sum(weights))


def binary_cross_entropy(
    logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> Sum:
    """Sum weighted negative log-likelihoods of labels 0 and 1, in nats.

    logits, weights f32, labels of any dtype, all of the same shape.
    """
    y = labels.astype(logits.dtype)
    # log(1 + exp(x)) - x y, without overflow
    loss = jnp.maximum(logits, 0) - logits * y + jnp.log1p(jnp.exp(-jnp.abs(logits)))
    check_shapes(logits[..., None], labels, weights)
    return Sum(jnp.sum(weights * loss), jnp.sum(weights))


def kl_divergence(
    student: jax.Array, teacher: jax.Array, weights: jax.Array, temperature: float = 1.0
) -> Sum:
    """Sum weighted T^2 KL(p || q) of softmaxes at temperature T, in nats.

    student: logits of q, f32 [..., V]; teacher: logits of p, which get no gradient;
    weights f32 [...]. T^2 keeps the size of the gradients independent of T (Hinton et
    al. 2015, arXiv 1503.02531, section 2.1). Equal logits give 0 and, but for
    rounding, no gradient.
    """
    check_shapes(student, teacher[..., 0], weights)
    q, p = student / temperature, jax.lax.stop_gradient(teacher) / temperature
    *_, norm_q = exponentials(q)
    e, total, norm_p = exponentials(p)
    # By log_softmax these would be four exponentials for each pair of logits, the
    # gradient's included, and not two. On CPUs they take much of the step.
    each = jnp.sum(e * (p - q), axis=-1) / total + (norm_q - norm_p)
    return Sum(temperature**2 * jnp.sum(weights * each), jnp.sum(weights))


def cosine_distance(x: jax.Array, y: jax.Array, weights: jax.Array) -> Sum:
    """Sum weighted 1 - cos(x, y), f32; x, y [..., D], weights [...].

    y gets no gradient. A zero vector has cosine 0 with every vector, as in torch's
    CosineEmbeddingLoss.
    """
    check_shapes(x, y[..., 0], weights)
    x, y = x.astype(jnp.float32), jax.lax.stop_gradient(y).astype(jnp.float32)
    least = 1e-12
    one, other = (jnp.sum(jnp.square(z), axis=-1) + least for z in (x, y))
    cosine = jnp.sum(x * y, axis=-1) * jax.lax.rsqrt(one) * jax.lax.rsqrt(other)
    return Sum(jnp.sum(weights * (1.0 - cosine)), jnp.sum(weights))


def check_shapes(logits: jax.Array, ids: jax.Array, weights: jax.Array) -> None:
    """Raise ValueError for shapes that would fit only by broadcasting."""
    if not logits.shape[:-1] == ids.shape == weights.shape:
        raise ValueError(f"shapes {logits.shape}, {ids.shape}, {weights.shape} differ")
