# SPDX-License-Identifier: Apache-2.0
"""Products of bfloat16 by oneDNN on CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.inference import forward
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import init
from bertjax.parallel import cpu_products


@pytest.fixture
def options(monkeypatch):
    """Return find(has_amx) -> the options on a processor with AMX, or without."""

    def forget():
        cpu_products.onednn_options.cache_clear()
        forward.make_forward.cache_clear()

    def find(has_amx):
        monkeypatch.setattr(cpu_products, "cpu_has", lambda *names: has_amx)
        forget()
        return cpu_products.onednn_options()

    cache = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield find
    jax.config.update("jax_compilation_cache_dir", cache)
    forget()


def test_processors_without_amx_keep_xlas_own_library(options):
    assert options(False) == {}


def test_a_version_without_the_options_keeps_its_own_library(options, monkeypatch):
    monkeypatch.setattr(cpu_products, "ONEDNN", {"xla_cpu_no_such_option": True})
    assert options(True) == {}
    monkeypatch.setattr(cpu_products, "ONEDNN", {"xla_cpu_enable_fast_min_max": True})
    assert options(True) == {}  # known, but nothing is of oneDNN then


def test_programs_for_the_cache_keep_xlas_own_library(options, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert options(True) == {}


@pytest.mark.parametrize("act", ["gelu", "relu2"])
def test_both_libraries_give_the_same_vectors_and_keep_nan(options, act):
    cfg = EncoderConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=32,
        hidden_act=act,
        dtype="bfloat16",
    )
    params = init(jax.random.key(0), cfg)
    draw = np.random.default_rng(0)
    batch = {
        "input_ids": jnp.asarray(draw.integers(0, 97, (4, 32))),
        "sizes": jnp.asarray([32, 5, 17, 1]),
    }

    def vectors(params):
        run = forward.make_forward(cfg, forward.pooled_vectors, "mean", True)
        return run(forward.place_params({"encoder": params}, cfg), batch)

    options(False)
    usual = vectors(params)
    if not options(True):
        pytest.skip("this version of XLA has no oneDNN")
    np.testing.assert_allclose(vectors(params), usual, atol=0.01)
    up = params["layers"]["mlp"]["up"]
    up["kernel"] = jnp.full_like(up["kernel"], jnp.nan)
    assert np.isnan(vectors(params)).all()
