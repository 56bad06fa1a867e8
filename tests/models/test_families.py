# SPDX-License-Identifier: Apache-2.0
"""Each family against transformers 5 (see testdata/make_family_golden.py)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.interop.tensor_layout import unflatten
from bertjax.models import encoder, families, heads
from bertjax.models.config import EncoderConfig
from bertjax.models.families import FAMILIES
from bertjax.parallel.sharding import path_name

GOLDEN = np.load(Path(__file__).parents[1] / "testdata/family_golden.npz")
NAMES = sorted({k.split("/")[0] for k in GOLDEN if "/" in k})
RESULTS = ("hidden", "pooled", "mlm_logits", "nsp_logits", "sop_logits", "rtd_logits")


def read(name, length=None):
    """Return (config, parameters, batch) of a golden model, truncated to a length."""
    cfg = EncoderConfig(**json.loads(str(GOLDEN[f"{name}/config"])))
    prefix = f"{name}/params/"
    params = unflatten(
        (key.removeprefix(prefix), jnp.asarray(GOLDEN[key], jnp.float32) / 64)
        for key in GOLDEN
        if key.startswith(prefix)
    )
    batch = {
        key: jnp.asarray(GOLDEN[f"{name}/{key}"], jnp.int32)[:, :length]
        for key in ("input_ids", "attention_mask", "token_type_ids")
    }
    if cfg.type_vocab_size < 2:
        del batch["token_type_ids"]
    return cfg, params, batch


def mlm(params, cfg, batch, hidden):
    word = params["encoder"]["embeddings"]["word"]
    return heads.mlm_logits(params["mlm"], word, cfg, hidden)


def run(params, cfg, batch):
    """Return all outputs that the golden file may have of transformers."""
    hidden, pooled = encoder.apply(params["encoder"], cfg, batch)
    out = {"hidden": hidden, "mlm_logits": mlm(params, cfg, batch, hidden)}
    if cfg.pooler:
        out["pooled"] = pooled
    for name in {"nsp", "sop"} & set(params):
        out[f"{name}_logits"] = heads.class_logits(params[name], pooled)
    if "rtd" in params:
        out["rtd_logits"] = heads.rtd_logits(params["rtd"], cfg, hidden)
    return out


@pytest.mark.parametrize(
    "length, end",
    [(None, ""), pytest.param(1, "_of_one", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_transformers(name, length, end):
    """Outputs at real tokens are equal; outputs at padding do not matter."""
    cfg, params, batch = read(name, length)
    out = jax.jit(run, static_argnums=1)(params, cfg, batch)
    expected = {
        key: GOLDEN[f"{name}/{key}{end}"]
        for key in RESULTS
        if f"{name}/{key}{end}" in GOLDEN
    }
    assert out.keys() == expected.keys()
    real = np.asarray(batch["attention_mask"]) > 0
    for key, value in out.items():
        ours, theirs = np.asarray(value), expected[key]
        assert ours.shape == theirs.shape
        if ours.shape[:2] == real.shape:
            ours, theirs = ours[real], theirs[real]
        # The random weights are large, so logits reach several dozens.
        scale = max(1.0, float(np.abs(theirs).max()))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * scale, err_msg=key)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_gradients_equal_those_of_transformers(name):
    cfg, params, batch = read(name)
    labels = jnp.asarray(GOLDEN[f"{name}/labels"], jnp.int32)

    @jax.jit
    @jax.grad
    def gradient(params):
        hidden = encoder.apply(params["encoder"], cfg, batch).hidden
        logs = jax.nn.log_softmax(mlm(params, cfg, batch, hidden))
        asked = labels >= 0
        found = jnp.take_along_axis(logs, jnp.maximum(labels, 0)[..., None], 2)[..., 0]
        return -jnp.sum(jnp.where(asked, found, 0)) / jnp.sum(asked)

    for path, grad in jax.tree_util.tree_leaves_with_path(gradient(params)):
        theirs = GOLDEN[f"{name}/grads/{path_name(path)}"]
        error = float(jnp.abs(grad - theirs).max())
        assert error <= 1e-4 * max(np.abs(theirs).max(), 1e-2), path_name(path)


@pytest.mark.parametrize("name", NAMES)
def test_made_parameters_have_the_golden_layout(name):
    cfg, params, _ = read(name)
    key = jax.random.key(0)
    made = jax.eval_shape(
        lambda: {"encoder": encoder.init(key, cfg), "mlm": heads.init_mlm(key, cfg)}
    )
    params = {k: params[k] for k in made}
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, params)


# ---------------------------------------------------------------- sizes
@pytest.mark.parametrize(
    "family, size, vocab, published",
    [
        ("albert", "base", 30_000, 11_683_584),
        ("albert", "large", 30_000, 17_683_968),
        ("albert", "xlarge", 30_000, 58_724_864),
        ("albert", "xxlarge", 30_000, 222_595_584),
        ("distilbert", "base", 30_522, 66_362_880),
        ("bert", "base", 30_522, 109_482_240),
        ("bert", "large", 30_522, 335_141_888),
        ("roberta", "base", 50_265, 124_645_632),
        ("xlm-roberta", "base", 250_002, 278_043_648),
        ("camembert", "base", 32_005, 110_621_952),
        ("mpnet", "base", 30_527, 109_486_464),
        ("electra", "small", 30_522, 13_483_008),
        ("electra", "base", 30_522, 108_891_648),
        ("modernbert", "base", 50_368, 149_014_272),
        ("modernbert", "large", 50_368, 394_781_696),
    ],
)
def test_parameter_counts(family, size, vocab, published):
    cfg = make(family, size, vocab)
    made = jax.eval_shape(lambda: encoder.init(jax.random.key(0), cfg))
    assert encoder.count_params(made) == published


def test_the_layers_of_plato_xl():
    """They have 72 x (4 D^2 + 2 D M + biases and norms) = 10.87 billion parameters."""
    made = jax.eval_shape(
        lambda: encoder.init(jax.random.key(0), make("plato", "xl", 8001))
    )
    d, m = 3072, 18_432
    each = 4 * d * d + 2 * d * m + 4 * d + m + d + 4 * d
    assert encoder.count_params(made["layers"]) == 72 * each
    assert round(72 * each / 1e9, 2) == 10.87
    assert made["embeddings"]["streams"]["role"].shape == (128, d)
    assert made["embeddings"]["token_type"].shape == (3, d)


def make(family, size, vocab_size):
    known = FAMILIES[family]
    shape = {**known.fixed, **known.sizes[size]}
    shape.setdefault("intermediate_size", 4 * shape["hidden_size"])
    return EncoderConfig(vocab_size=vocab_size, **shape)


# ---------------------------------------------------------------- names of sizes
def test_a_size_is_named_by_its_shape_alone():
    spelled = dict(num_hidden_layers=6, hidden_size=384, num_attention_heads=12)
    spelled |= dict(intermediate_size=1536, vocab_size=30522)
    assert families.size_name("bert", spelled) == ""
    base = dict(num_hidden_layers=12, hidden_size=768, num_attention_heads=12)
    base |= dict(intermediate_size=3072)
    assert families.size_name("bert", base) == "base"
    assert families.size_name("bert", base | {"intermediate_size": 768}) == ""
    # A converted MiniLM once recorded the first size of its family, which was wrong.
    for size in ("tiny", ""):
        found = families.in_effect({"family": "bert", "size": size, **spelled})
        assert found["size"] == "" and found["hidden_size"] == 384
    left = dict.fromkeys(spelled)
    found = families.in_effect({"family": "roberta", "size": "tiny", **left})
    assert (found["size"], found["hidden_size"], found["vocab_size"]) == (
        "tiny", 128, None,
    )  # fmt: skip
    assert found["intermediate_size"] == 512
