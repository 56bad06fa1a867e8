# SPDX-License-Identifier: Apache-2.0
"""Initial values of parameters."""

import dataclasses

import jax
import pytest
from conftest import tiny_encoder

from bertjax.models import decoder, encoder, heads
from bertjax.parallel.sharding import path_name

# Standard deviations in transformers'
# T5ForConditionalGeneration(T5Config(d_model=128, d_kv=64, d_ff=512)).
T5 = {
    "word": 1.0,
    "relative": 0.0884,
    "query": 0.01105,
    "key": 0.0884,
    "value": 0.0884,
    "output": 0.0884,
    "up": 0.0884,
    "down": 0.0442,
}


def test_t5s_deviations_are_those_of_transformers():
    cfg = tiny_encoder(
        2000,
        32,
        hidden_size=128,
        num_attention_heads=2,
        intermediate_size=512,
        num_hidden_layers=2,
        num_decoder_layers=2,
        attention_scale=1.0,
        fan_in_init=True,
        type_vocab_size=0,
        position_embedding_type="none",
        relative_attention_num_buckets=32,
        tie_word_embeddings=False,
    )
    parts = {"encoder": encoder.init, "decoder": decoder.init, "mlm": heads.init_mlm}
    params = {name: init(jax.random.key(3), cfg) for name, init in parts.items()}
    seen = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = path_name(path).removesuffix("/kernel").split("/")
        if names[-1] in T5:
            seen.add(names[-1])
            assert float(leaf.std()) == pytest.approx(T5[names[-1]], rel=0.15), path
        elif names[-1] in ("decoder", "transform", "pooler"):  # as in T5X
            assert float(leaf.std()) == pytest.approx(128**-0.5, rel=0.05), path
        else:
            assert float(leaf.std()) == 0, path
    assert seen == T5.keys()


def test_scores_that_are_scaled_as_usual_have_queries_like_keys():
    cfg = tiny_encoder(20, 32, hidden_size=64, num_attention_heads=2)
    cfg = dataclasses.replace(cfg, fan_in_init=True)
    attention = encoder.init(jax.random.key(0), cfg)["layers"]["attention"]
    for name in ("query", "key", "output"):
        kernel = attention[name]["kernel"]
        assert float(kernel.std()) == pytest.approx(0.125, rel=0.05), name
