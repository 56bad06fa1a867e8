# SPDX-License-Identifier: Apache-2.0
"""An encoder with TPU kernels (interpreted) returns the same as with XLA."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.models import encoder
from bertjax.models.config import EncoderConfig

B, L = 2, 128
REAL = (np.arange(L) < np.array([[L], [90]])).astype(np.int32)
AT = np.array([[3, 77, 120, 0], [5, 64, 88, 0]], np.int32)  # a slot without a target
STEPS = np.random.default_rng(0).integers(-3, 4, (B, L)).astype(np.int32)
CFG = EncoderConfig(
    vocab_size=40,
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=L,
    initializer_range=0.2,
    remat="dots",
)
# Global and local layers alternate; in a loop over layers a condition chooses.
LOCAL = dict(
    position_embedding_type="rope",
    norm_position="pre",
    first_attention_norm=False,
    local_attention=16,
    global_attn_every_n_layers=2,
)


@functools.cache
def run(cfg: EncoderConfig, only: int, steps: bool = False) -> list[np.ndarray]:
    """Return loss, hidden (at AT or at all real tokens), pooled and all gradients."""
    ids = jax.random.randint(jax.random.key(0), (B, L), 0, cfg.vocab_size)
    batch = {"input_ids": ids, "attention_mask": REAL}
    if steps:
        batch["attention_steps"] = REAL * STEPS
    weights = np.ones_like(AT) if only else REAL

    def loss(params):
        rng = jax.random.key(2)
        hidden, pooled = encoder.apply(params, cfg, batch, rng, AT if only else None)
        hidden = hidden * weights[..., None]
        pull = jax.random.normal(jax.random.key(3), (*hidden.shape[1:],))
        return jnp.sum(hidden * pull) + jnp.sum(pooled), (hidden, pooled)

    params = encoder.init(jax.random.key(1), cfg)
    found = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return [np.asarray(x) for x in jax.tree.leaves(found)]


QUICK = {
    ("fused", 1, 0, 1),
    ("fused", 1, 1, 0),
    ("splash", 1, 1, 1),
    ("splash", 0, 0, 1),
}


@pytest.mark.parametrize(
    "backend, local, unroll, only",
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(("fused", "splash"), (0, 1), (0, 1), (0, 1))
    ],
)
def test_kernels_in_an_encoder(backend, local, unroll, only):
    """Values and gradients are the same with dropout, and with the last layer at AT."""
    rate = 0.2 if backend == "fused" else 0.0  # splash has no dropout
    changes = LOCAL if local else {}
    cfg = dataclasses.replace(
        CFG, **changes, attention_probs_dropout_prob=rate, unroll=unroll
    )
    wanted = run(dataclasses.replace(cfg, attention="xla"), only)
    found = run(dataclasses.replace(cfg, attention=backend), only)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4 * max(1, np.abs(b).max()))


@pytest.mark.parametrize(
    "backend, kind, local",
    [
        ("fused", "causal", 1),
        pytest.param("fused", "steps", 0, marks=pytest.mark.slow),
        pytest.param("splash", "causal", 1, marks=pytest.mark.slow),
        ("splash", "steps", 1),
    ],
)
def test_kernels_in_an_encoder_whose_tokens_see_some(backend, kind, local):
    """Steps run in a loop over layers, a causal model unrolled with its last at AT."""
    changes = LOCAL if local else {}
    rate = 0.2 if backend == "fused" else 0.0
    is_decoder = kind == "causal"
    cfg = dataclasses.replace(
        CFG,
        **changes,
        attention_probs_dropout_prob=rate,
        unroll=0 if is_decoder else 1,
        is_decoder=is_decoder,
        classifier_pooling="last" if is_decoder else "cls",
    )
    told = int(is_decoder), not is_decoder
    wanted = run(dataclasses.replace(cfg, attention="xla"), *told)
    found = run(dataclasses.replace(cfg, attention=backend), *told)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4 * max(1, np.abs(b).max()))
