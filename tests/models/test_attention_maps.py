# SPDX-License-Identifier: Apache-2.0
"""The attention maps are the attention weights that the encoder uses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ENCODERS

from bertjax.models import encoder, stacked_layers, transformer_layer
from bertjax.models.attention import attend
from bertjax.models.attention_maps import attention_maps, weights
from bertjax.models.attention_mask import AttentionMask
from bertjax.models.config import EncoderConfig

KEYS = np.array([[1] * 6, [1] * 4 + [0] * 2])
PACKED = np.array([[1, 1, 2, 2, 2, 3], [1, 1, 1, 2, 0, 0]])


@pytest.mark.parametrize(
    "mask",
    [
        AttentionMask(KEYS),
        AttentionMask(KEYS, window=2),
        AttentionMask(PACKED, packed=True),
    ],
)
def test_weights_times_values_is_what_attend_gives(mask):
    q, k, v = (
        jax.random.normal(key, (2, 6, 3, 4))
        for key in jax.random.split(jax.random.key(0), 3)
    )
    found = weights(q, k, mask)
    assert found.shape == (2, 3, 6, 6) and found.dtype == jnp.float32
    mixed = jnp.einsum("BHQT,BTHK->BQHK", found, v)
    want = attend(q, k, v, mask, 0.0, None)
    np.testing.assert_allclose(mixed, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.sum(-1), 1.0, rtol=1e-5)
    assert not np.any(found[~np.broadcast_to(mask.boolean, found.shape)])


@pytest.mark.parametrize("name", ENCODERS)
def test_maps_are_those_of_the_encoder(name, monkeypatch):
    cfg = EncoderConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        initializer_range=0.5,
        **ENCODERS[name],
    )
    params = encoder.init(jax.random.key(1), cfg)
    batch = {"input_ids": np.arange(12).reshape(2, 6), "attention_mask": KEYS}
    seen = []

    def record(q, k, v, mask, *rest):
        seen.append(weights(q, k, mask))
        return attend(q, k, v, mask, *rest)

    monkeypatch.setattr(transformer_layer, "attend", record)

    @jax.jit
    def both(params):
        encoder.apply(stacked_layers.unstack(params, cfg), cfg, batch)
        return attention_maps(params, cfg, batch), jnp.stack(seen[:3])

    got, want = both(params)
    assert got.shape == (3, 2, 2, 6, 6)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
