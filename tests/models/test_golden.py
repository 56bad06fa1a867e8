# SPDX-License-Identifier: Apache-2.0
"""The encoder against another implementation (see testdata/make_bert_golden.py)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.models import encoder, heads
from bertjax.models.config import EncoderConfig

GOLDEN = np.load(Path(__file__).parents[1] / "testdata/bert_golden.npz")
CONFIGS = {
    "exact": dict(num_attention_heads=2, hidden_act="gelu"),
    "tanh": dict(num_attention_heads=4, hidden_act="gelu_tanh", layer_norm_eps=1e-5),
}
HEADS = ("attention.self.query", "attention.self.key", "attention.self.value")


def read(name):
    """Return (config, parameters, batch) of a golden model in bertjax's layout."""
    prefix = f"{name}/weights/"
    w = {k.removeprefix(prefix): GOLDEN[k] for k in GOLDEN if k.startswith(prefix)}
    vocab, d = w["bert.embeddings.word_embeddings.weight"].shape
    layers = sum(k.endswith("intermediate.dense.bias") for k in w)
    cfg = EncoderConfig(
        vocab_size=vocab,
        hidden_size=d,
        num_hidden_layers=layers,
        intermediate_size=w["bert.encoder.layer.0.intermediate.dense.bias"].size,
        max_position_embeddings=len(w["bert.embeddings.position_embeddings.weight"]),
        **CONFIGS[name],
    )
    split = (cfg.num_attention_heads, cfg.head_dim)

    def dense(key, kernel=None, bias=None):
        k, b = w[f"{key}.weight"].T, w[f"{key}.bias"]
        return {"kernel": k.reshape(kernel or k.shape), "bias": b.reshape(bias or -1)}

    def norm(key):
        return {"scale": w[f"{key}.weight"], "bias": w[f"{key}.bias"]}

    def layer(i):
        at = f"bert.encoder.layer.{i}."
        q, k, v = (dense(at + part, (d, *split), split) for part in HEADS)
        out = dense(f"{at}attention.output.dense", (*split, d))
        return {
            "attention": {
                "query": q,
                "key": k,
                "value": v,
                "output": out,
                "norm": norm(f"{at}attention.output.LayerNorm"),
            },
            "mlp": {
                "up": dense(f"{at}intermediate.dense"),
                "down": dense(f"{at}output.dense"),
                "norm": norm(f"{at}output.LayerNorm"),
            },
        }

    params = {
        "encoder": {
            "embeddings": {
                "word": w["bert.embeddings.word_embeddings.weight"],
                "position": w["bert.embeddings.position_embeddings.weight"],
                "token_type": w["bert.embeddings.token_type_embeddings.weight"],
                "norm": norm("bert.embeddings.LayerNorm"),
            },
            "layers": jax.tree.map(lambda *x: np.stack(x), *map(layer, range(layers))),
            "pooler": dense("bert.pooler.dense"),
        },
        "mlm": {
            "transform": dense("cls.predictions.transform.dense"),
            "norm": norm("cls.predictions.transform.LayerNorm"),
            "bias": w["cls.predictions.bias"],
        },
        "nsp": dense("cls.seq_relationship"),
    }
    batch = {
        key: jnp.asarray(GOLDEN[f"{name}/{key}"])
        for key in ("input_ids", "attention_mask", "token_type_ids")
    }
    return cfg, jax.tree.map(jnp.asarray, params), batch


@pytest.mark.parametrize("name", CONFIGS)
def test_equal_to_another_implementation(name):
    cfg, params, batch = read(name)

    @jax.jit
    def run(params, batch):
        hidden, pooled = encoder.apply(params["encoder"], cfg, batch)
        word = params["encoder"]["embeddings"]["word"]
        return {
            "hidden": hidden,
            "pooled": pooled,
            "mlm_logits": heads.mlm_logits(params["mlm"], word, cfg, hidden),
            "nsp_logits": heads.class_logits(params["nsp"], pooled),
        }

    for key, value in run(params, batch).items():
        expected = GOLDEN[f"{name}/{key}"]
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5, err_msg=key)


def test_made_parameters_have_the_golden_layout():
    cfg, params, _ = read("exact")
    made = jax.eval_shape(
        lambda rng: {
            "encoder": encoder.init(rng, cfg),
            "mlm": heads.init_mlm(rng, cfg),
            "nsp": heads.init_classes(rng, cfg),
        },
        jax.random.key(0),
    )
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, params)


def test_the_two_gelus_differ():
    cfg, params, batch = read("tanh")
    other = EncoderConfig(**{**vars(cfg), "hidden_act": "gelu"})
    a, b = (encoder.apply(params["encoder"], c, batch).hidden for c in (cfg, other))
    assert 1e-5 < float(jnp.abs(a - b).max()) < 0.1
