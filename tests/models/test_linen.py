# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np

from bertjax.models import encoder, linen
from bertjax.models.config import EncoderConfig


def test_the_module_is_the_encoder():
    cfg = EncoderConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    batch = {"input_ids": jnp.arange(8)[None], "attention_mask": jnp.ones((1, 8))}
    module = linen.Encoder(cfg)
    variables = jax.jit(module.init)(jax.random.key(0), batch)
    params = encoder.init(jax.random.key(1), cfg)
    shapes = jax.tree.map(jnp.shape, variables["params"]["encoder"])
    assert shapes == jax.tree.map(jnp.shape, params)
    out = module.apply({"params": {"encoder": params}}, batch)
    np.testing.assert_array_equal(out.hidden, encoder.apply(params, cfg, batch).hidden)
    dropped = module.apply(
        {"params": {"encoder": params}}, batch, rngs={"dropout": jax.random.key(2)}
    )
    assert jnp.abs(dropped.hidden - out.hidden).max() > 1e-3
