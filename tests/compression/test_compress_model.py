# SPDX-License-Identifier: Apache-2.0
"""Whole encoders: the inputs of their matrices, and their compressed weights."""

import functools
import json
import subprocess
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import ENCODERS

from bertjax import UserError
from bertjax.compression import grid_table
from bertjax.compression.compress_model import check_model, compress_model
from bertjax.compression.grid_table import make_grid, markdown
from bertjax.compression.hessians import Walk
from bertjax.compression.methods import make_recipe
from bertjax.compression.packed import read_packed, write_packed
from bertjax.compression.write_model import flatten
from bertjax.models import encoder
from bertjax.models.config import EncoderConfig
from bertjax.models.stacked_layers import take_layer

SIZES = dict(
    vocab_size=40, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
    intermediate_size=24, max_position_embeddings=32, initializer_range=0.4,
)  # fmt: skip
SKIPS = dict(embedding_skip=True, value_skip=True, unet_skips=True, norm_position="pre")
MORE = ("shared", "skips", "causal")
FAMILIES = {**ENCODERS, "skips": SKIPS, "causal": dict(is_decoder=True, pooler=False)}


@functools.cache
def draw_model(name):
    cfg = EncoderConfig(**SIZES, **FAMILIES[name])
    init = jax.jit(encoder.init, static_argnums=1)
    return cfg, {"encoder": init(jax.random.key(0), cfg)}


def make_model(name):
    cfg, params = draw_model(name)
    return cfg, jax.tree.map(np.array, params)


def make_batch(pad, rows=4, seed=0):
    """Make rows of 5 to 8 tokens, padded to `pad`; the last row has weight 0."""
    draw = np.random.default_rng(seed)
    real = (np.arange(pad) < np.array([8, 5, 7, 8])[:rows, None]).astype(np.int32)
    ids = draw.integers(1, 40, (rows, 8))
    ids = np.pad(ids, ((0, 0), (0, pad - 8))).astype(np.int32) * real
    weights = np.ones(rows, np.float32)
    weights[-1] = 0
    return {"input_ids": ids, "attention_mask": real, "example_weights": weights}


def run(params, cfg, batch):
    inputs = {k: batch[k] for k in ("input_ids", "attention_mask")}
    apply = jax.jit(lambda p, x: encoder.apply(p, cfg, x).hidden)
    return np.asarray(apply(params["encoder"], inputs))


def depths_of(cfg):
    return [
        [d for d, g in enumerate(cfg.groups) if g == group]
        for group in range(cfg.groups[-1] + 1)
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_walk_is_the_encoder(name):
    """Layer by layer, the walk computes what the encoder does."""
    cfg, params = make_model(name)
    batch = make_batch(8)
    part = params["encoder"]
    walk = Walk(part["embeddings"], cfg, [batch])
    groups = depths_of(cfg)
    for group, depths in enumerate(groups):
        walk.advance(take_layer(part["layers"], group, len(groups)), depths)
    want = run(params, cfg, batch)
    real = batch["attention_mask"].astype(bool)
    np.testing.assert_allclose(walk.hidden[0][real], want[real], atol=2e-5)
    assert walk.tokens == 8 + 5 + 7


def test_hessians_are_of_real_tokens_alone():
    """Padding and batches do not change Hessians; the first layer's inputs are the
    embeddings."""
    cfg, params = make_model("bert")
    part = params["encoder"]
    layer = take_layer(part["layers"], 0, 3)
    found = Walk(part["embeddings"], cfg, [make_batch(8)]).hessians(layer, [0])
    longer = [make_batch(8, 4), make_batch(12, 4)]
    padded = Walk(part["embeddings"], cfg, [longer[1]]).hessians(layer, [0])
    twice = Walk(part["embeddings"], cfg, [longer[0]] * 2).hessians(layer, [0])
    widths = {k: h.shape[0] for k, h in found.items()}
    assert widths == {
        "attention/query": 16, "attention/output": 16, "mlp/up": 16, "mlp/down": 24
    }  # fmt: skip
    for name, one in found.items():
        np.testing.assert_allclose(padded[name], one, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(twice[name], one, rtol=1e-4, atol=1e-5)
    batch = make_batch(8)
    first = Walk(part["embeddings"], cfg, [batch]).hidden[0]
    x = np.asarray(first)[:3][batch["attention_mask"][:3].astype(bool)]
    np.testing.assert_allclose(found["attention/query"], x.T @ x / 20, rtol=1e-4)


def test_shared_layers_are_seen_at_all_depths():
    cfg, params = make_model("shared")
    part, (first, _) = params["encoder"], depths_of(cfg)
    assert len(first) == 2
    layer = take_layer(part["layers"], 0, 2)
    walk = Walk(part["embeddings"], cfg, [make_batch(8)])
    both = walk.hessians(layer, first)
    one = walk.hessians(layer, first[:1])
    walk.advance(layer, first[:1])
    other = walk.hessians(layer, first[1:])
    for name, h in both.items():
        np.testing.assert_allclose(
            h, (one[name] + other[name]) / 2, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    "name",
    ["bert", "local", *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)],
)
def test_every_family_is_pruned_and_packed(name, tmp_path):
    cfg, params = make_model(name)
    before = {k: v.copy() for k, v in flatten(params).items()}
    recipe = make_recipe("sparsegpt", "2:4")
    done = compress_model(params, cfg, recipe, [make_batch(8)])
    leaves = flatten(params)
    kernels = [k for k in leaves if "layers/" in k and k.endswith("kernel")]
    assert len(kernels) == 6 + (cfg.mlp_type == "glu")
    assert done.weights == sum(leaves[k].size for k in kernels)
    assert done.zeros == done.weights / 2 and done.tokens == 20
    assert 0 < done.error < 1
    same = [k for k in leaves if k not in done.forms]
    assert len(same) == len(leaves) - len(done.forms)
    assert all(np.array_equal(leaves[k], before[k]) for k in same)
    assert np.isfinite(run(params, cfg, make_batch(8))).all()
    write_packed(tmp_path / "p", leaves, done.forms, {})
    found = flatten(read_packed(tmp_path / "p")[0])
    assert found.keys() == leaves.keys()
    assert all(np.array_equal(found[k], leaves[k]) for k in leaves)


@pytest.mark.parametrize("embeddings", ["8", "same", "dense"])
def test_tables_as_they_are_asked_for(embeddings):
    cfg, params = make_model("bert")
    word = params["encoder"]["embeddings"]["word"].copy()
    how = dict(bits=3, group_size=8, embeddings=embeddings)
    done = compress_model(params, cfg, make_recipe("rtn", **how), [])
    found = params["encoder"]["embeddings"]["word"]
    steps = {len({*row.tolist()}) for row in found.reshape(-1, 8)}
    if embeddings == "dense":
        assert np.array_equal(found, word)
        assert not [k for k in done.forms if "embeddings" in k]
    elif embeddings == "same":
        assert max(steps) <= 8 and done.error is None
    else:
        assert np.abs(found - word).max() < np.ptp(word) / 254


def test_later_layers_see_what_is_left_of_the_earlier():
    """A later layer is compressed with inputs from the compressed earlier layers."""
    cfg, params = make_model("bert")
    other = jax.tree.map(np.copy, params)
    recipe = make_recipe("gptq", bits=3, group_size=8, embeddings="dense")
    compress_model(params, cfg, recipe, [make_batch(8)])
    walk = Walk(other["encoder"]["embeddings"], cfg, [make_batch(8)])
    for i in range(2):
        walk.advance(take_layer(params["encoder"]["layers"], i, 3), [i])
    layer = take_layer(other["encoder"]["layers"], 2, 3)
    seen = walk.hessians(layer, [2])["mlp/down"]
    from bertjax.compression.quantize import dequantize

    want = dequantize(recipe.compress(layer["mlp"]["down"]["kernel"], seen))
    found = params["encoder"]["layers"]["mlp"]["down"]["kernel"][2]
    np.testing.assert_array_equal(found, want)


def test_a_model_of_nan_is_refused():
    cfg, params = make_model("bert")
    params["encoder"]["layers"]["mlp"]["down"]["kernel"][1, 2, 3] = np.nan
    with pytest.raises(UserError, match="weights of mlp/down are not finite"):
        compress_model(params, cfg, make_recipe("magnitude"), [])


def test_encoder_decoders_are_refused():
    cfg = EncoderConfig(**SIZES, num_decoder_layers=2)
    with pytest.raises(UserError, match="--model=x is an encoder-decoder"):
        check_model(cfg, "--model=x")


@pytest.mark.parametrize(
    "given, said",
    [
        (dict(method="sparsegtp"), "did you mean 'sparsegpt'"),
        (dict(method="gptq", bits=5), "--bits=5: give one of 8, 4, 3"),
        (dict(method="gptq", sparsity="0.5"), "gptq quantizes: leave it out"),
        (dict(method="wanda", bits=4), "wanda prunes: leave it out"),
        (dict(method="wanda", sparsity="2"), "--sparsity=2: give a share"),
        (dict(method="rtn", embeddings="4"), "--embeddings='4' is unknown"),
    ],
)
def test_recipes_that_are_none(given, said):
    with pytest.raises(UserError, match=said):
        make_recipe(**given)


def test_the_grid_and_its_table():
    grid = make_grid(["wanda", "rtn"], [], ["4"], None, "8")
    assert [r.degree for r in grid] == ["50%", "60%", "70%", "2:4", "4 bits"]
    grid = make_grid(["wanda"], ["0.501", "0.5", "0.50"], [], None, "8")
    assert [r.degree for r in grid] == ["50.1%", "50%"]
    rows = [
        {"method": "dense", "degree": "", "bytes": 4e6, "values": {"loss": 2.0}},
        {"method": "rtn", "degree": "4 bits", "bytes": 1e6, "values": {"loss": 2.5}},
    ]
    lines = [*markdown(rows)]
    assert lines[0] == "| method | how far | MB | of dense | loss |"
    assert lines[3] == "| rtn | 4 bits | 1.0 | 0.250 | 2.5000 (+0.5000) |"


@pytest.mark.parametrize(
    "methods, given, said",
    [
        (["rtn"], (["0.5"], [], None), "--sparsity: of --method=rtn none prunes"),
        (["wanda"], ([], ["4"], None), "--bits: of --method=wanda none quantizes"),
        (["wanda"], ([], [], 64), "--group_size: of --method=wanda none quantizes"),
    ],
)
def test_a_grid_that_reads_not_all_flags(methods, given, said):
    with pytest.raises(UserError, match=said):
        make_grid(methods, *given, "8")


def test_the_dense_row_is_of_the_parameters_that_are_compressed(monkeypatch):
    """A run with an average is scored by the average, unless --weights=raw is given."""
    asked = []

    def run(command, **how):
        asked.append(command)
        printed = json.dumps({"step": 3, "loss": 2.0})
        return subprocess.CompletedProcess(command, 0, printed, "")

    monkeypatch.setattr(grid_table.subprocess, "run", run)
    rows = grid_table.run_grid(
        "RUN", [], None, "--what=mlm", ["loss"], None, print, "raw"
    )
    assert not [*rows]
    (command,) = asked
    assert command[3:] == ["--model=RUN", "--json", "--weights=raw", "--what=mlm"]


def test_models_of_a_grid_are_kept_in_the_folder_that_was_given(monkeypatch):
    written = []

    def write(small, into):
        written.append(into)
        return {"bytes": 1, "bytes_dense": 4}

    monkeypatch.setattr(grid_table, "write_small", write)
    monkeypatch.setattr(grid_table, "score", lambda *how: {"loss": 2.0})
    small = SimpleNamespace(about={"recovery": {}})
    recipes = make_grid(["wanda"], ["0.5"], [], None, "8")
    more = "--what=mlm", ["loss"], "out/50%", print
    [*grid_table.run_grid("RUN", recipes, lambda recipe: iter([small]), *more)]
    assert written == ["out/50%/wanda-50-recovered"]


def test_an_evaluation_of_lines_makes_no_table(monkeypatch):
    """--what=pll prints one object per line of text and no score of all lines."""
    printed = '{"score": -3.0}\n{"score": -9.0}\n'
    monkeypatch.setattr(
        grid_table.subprocess,
        "run",
        lambda command, **how: subprocess.CompletedProcess(command, 0, printed, ""),
    )
    with pytest.raises(UserError, match="--evaluate=--what=pll: it prints 2 objects"):
        grid_table.score("RUN", "--what=pll", ["score"])
