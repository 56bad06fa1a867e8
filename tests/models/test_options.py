# SPDX-License-Identifier: Apache-2.0
"""Each option of EncoderConfig alone, and the families that combine them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import fetched

from bertjax import UserError
from bertjax.models import encoder, heads
from bertjax.models.attention_mask import AttentionMask
from bertjax.models.config import EncoderConfig
from bertjax.models.families import FAMILIES
from bertjax.models.flops import flops_per_token
from bertjax.parallel.sharding import axes_of, path_name

V, L = 30, 16
CFG = EncoderConfig(
    vocab_size=V,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=20,
    unroll=1,  # one body: quick to compile
)
ROPE = dict(position_embedding_type="rope")
LOCAL = dict(local_attention=6)
PRE = dict(norm_position="pre")
MODERN = {
    **FAMILIES["modernbert"].fixed,
    **LOCAL,
    "max_position_embeddings": 20,
    "pooler": True,
}
OPTIONS = {
    "factorised": dict(embedding_size=6),
    "embedding_norm": dict(embedding_norm=False),
    "rope": ROPE,
    "relative": dict(
        relative_attention_num_buckets=8, relative_attention_max_distance=6
    ),
    "none": dict(position_embedding_type="none"),
    "offset": dict(position_offset=4),
    "pre": PRE,
    "pre_final": {**PRE, "final_norm": True},
    "first_norm": {**PRE, "first_attention_norm": False},
    "final_norm": dict(final_norm=True),
    "rms": dict(norm_type="rms_norm", norm_bias=False),
    "norm_bias": dict(norm_bias=False),
    "attention_bias": dict(attention_bias=False),
    "mlp_bias": dict(mlp_bias=False),
    "glu": dict(mlp_type="glu"),
    "local": LOCAL,
    "local_global": {**LOCAL, "global_attn_every_n_layers": 2},
    "two_bases": {
        **ROPE,
        **LOCAL,
        "local_rope_theta": 50.0,
        "global_attn_every_n_layers": 2,
    },
    "shared": dict(num_hidden_groups=1),
    "groups": dict(num_hidden_groups=2),
    "silu": dict(hidden_act="silu"),
    "relu2": dict(hidden_act="relu2"),
    "qk_norm": dict(qk_norm=True),
    "skips": dict(embedding_skip=True, value_skip=True, unet_skips=True),
    "modernbert": MODERN,
}
# The other options run with the slow tests.
FAST = [
    "factorised",
    "relative",
    "skips",
    "modernbert",  # rotary, pre-norm, gated
]
REST = [pytest.param(n, marks=pytest.mark.slow) for n in OPTIONS if n not in FAST]
named = pytest.mark.parametrize("name", [*FAST, *REST])


INIT = fetched(encoder.init, static_argnums=1)


def with_options(name):
    """Return (config, parameters large enough for differences to be visible)."""
    cfg = dataclasses.replace(CFG, **OPTIONS[name])
    return cfg, blurred(cfg)


def blurred(cfg):
    draw, made = np.random.default_rng(0), INIT(jax.random.key(0), cfg)
    return jax.tree.map(
        lambda x: (x + 0.2 * draw.standard_normal(x.shape)).astype(np.float32), made
    )


apply = fetched(encoder.apply, static_argnums=1)


def make_batch(rows=3):
    draw = np.random.default_rng(1)
    lengths = np.array([L, 9, 1])[:rows, None]
    return {
        "input_ids": draw.integers(0, V, (rows, L)).astype(np.int32),
        "attention_mask": (np.arange(L) < lengths).astype(np.int32),
        "token_type_ids": draw.integers(0, 2, (rows, L)).astype(np.int32),
    }


# ---------------------------------------------------------------- each alone
@named
def test_what_stands_at_padding_changes_nothing(name):
    cfg, params = with_options(name)
    batch = make_batch()
    real = batch["attention_mask"] > 0
    before = apply(params, cfg, batch)
    ids = np.where(real, batch["input_ids"], (batch["input_ids"] + 1) % V)
    after = apply(params, cfg, dict(batch, input_ids=ids))
    np.testing.assert_array_equal(before.hidden[real], after.hidden[real])
    np.testing.assert_array_equal(before.pooled, after.pooled)
    plain = apply(blurred(CFG), CFG, batch).hidden
    assert np.abs(before.hidden - plain)[real].max() > 1e-3


@named
def test_packed_sequences_are_as_they_would_be_alone(name):
    cfg, params = with_options(name)
    alone = make_batch(2)
    a, b = 7, 9
    alone["attention_mask"] = (np.arange(L) < np.array([[a], [b]])).astype(np.int32)
    both = {
        key: np.concatenate([alone[key][0, :a], alone[key][1, :b]])[None]
        for key in ("input_ids", "attention_mask", "token_type_ids")
    }
    both["segment_ids"] = np.repeat([1, 2], [a, b])[None].astype(np.int32)
    both["position_ids"] = np.r_[:a, :b][None].astype(np.int32)
    both["cls_positions"] = np.array([[0, a]], np.int32)
    one, two = apply(params, cfg, alone), apply(params, cfg, both)
    close = dict(rtol=0, atol=2e-5)
    np.testing.assert_allclose(two.hidden[0, :a], one.hidden[0, :a], **close)
    np.testing.assert_allclose(two.hidden[0, a:], one.hidden[1, :b], **close)
    np.testing.assert_allclose(two.pooled[0], one.pooled, **close)


@named
def test_each_leaf_learns_and_has_one_row_of_the_sharding_table(name):
    cfg, params = with_options(name)
    weights = np.random.default_rng(3).standard_normal((3, L, 16))

    def loss(params, cfg):
        hidden, pooled = encoder.apply(params, cfg, make_batch())
        return jnp.sum(hidden * weights) + jnp.sum(pooled)

    gradient = fetched(jax.grad(loss), static_argnums=1)
    grads = gradient(params, cfg)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        where = "encoder/" + path_name(path)
        assert len(axes_of(where).split()) == grad.ndim, where
        assert bool(np.isfinite(grad).all()), where
        # A key bias changes all scores of a query equally, so its gradient is 0.
        if cfg.position_embedding_type == "rope" or "key/bias" not in where:
            assert float(np.abs(grad).max()) > 1e-4, where
    for change in (dict(unroll=0, remat="full"), dict(remat="dots")):
        if name in ("groups", "skips", "modernbert"):
            other = gradient(params, dataclasses.replace(cfg, **change))
            for x, y in zip(*map(jax.tree.leaves, (grads, other)), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        dict(embedding_size=6),
        dict(tie_word_embeddings=False),
        dict(decoder_bias=False),
        dict(classifier_transform=False),
        dict(classifier_bias=False),
        dict(classifier_activation="relu"),
    ],
)
def test_switches_of_the_masked_lm_head(change):
    cfg = dataclasses.replace(CFG, **change)
    params = heads.init_mlm(jax.random.key(1), cfg)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert len(axes_of("mlm/" + path_name(path)).split()) == leaf.ndim
    assert ("decoder" in params) != cfg.tie_word_embeddings
    word = jax.random.normal(jax.random.key(2), (V, cfg.embedding_width))
    hidden = jax.random.normal(jax.random.key(3), (2, L, 16))
    logits = heads.mlm_logits(params, word, cfg, hidden)
    assert logits.shape == (2, L, V)
    other = heads.mlm_logits(params, 2 * word, cfg, hidden)
    assert bool((logits == other).all()) != cfg.tie_word_embeddings


@pytest.mark.parametrize(
    "change, word",
    [
        (dict(embedding_size=-1), "model.embedding_size=-1"),
        (dict(position_embedding_type="roap"), "did you mean 'rope'"),
        (dict(norm_position="prr"), "did you mean 'pre'"),
        (dict(mlp_type="geglu"), "model.mlp_type='geglu'"),
        (dict(norm_type="rmsnorm"), "did you mean 'rms_norm'"),
        (dict(classifier_activation="gelo"), "model.classifier_activation"),
        ({**ROPE, "position_offset": 2}, "model.position_offset=2"),
        (dict(position_offset=20), "model.position_offset=20 leaves none"),
        (
            {**ROPE, "hidden_size": 6},
            "model.position_embedding_type=rope rotates pairs",
        ),
        (dict(rope_theta=0.0), "model.rope_theta=0.0"),
        ({**ROPE, "local_rope_theta": 9.0}, "model.local_rope_theta=9.0"),
        ({**LOCAL, "local_rope_theta": 9.0}, "model.local_rope_theta=9.0"),
        (dict(global_attn_every_n_layers=3), "model.global_attn_every_n_layers=3"),
        (dict(norm_type="rms_norm"), "model.norm_bias=False"),
        (dict(first_attention_norm=False), "model.norm_position=pre"),
        (
            {**PRE, "first_attention_norm": False, "num_hidden_groups": 2},
            "model.num_hidden_groups=2",
        ),
        (dict(num_hidden_groups=4), "model.num_hidden_groups=4 is more"),
        (dict(unet_skips=True, num_hidden_layers=1), "model.unet_skips=True needs"),
        (dict(value_skip=True, num_hidden_layers=1), "model.value_skip=True needs"),
        *(
            (
                {name: True, "num_hidden_groups": 2},
                f"model.{name}=True and model.num_hidden_groups=2",
            )
            for name in ("embedding_skip", "value_skip", "unet_skips")
        ),
        (
            dict(classifier_transform=False, embedding_size=8),
            "model.embedding_size=8 needs model.classifier_transform",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(change, word):
    with pytest.raises(UserError, match=word.replace(".", r"\.")):
        dataclasses.replace(CFG, **change)


# ---------------------------------------------------------------- sharing
def test_gradients_of_a_shared_block_are_the_sum_over_depths():
    cfg, params = with_options("groups")
    assert cfg.groups == (0, 0, 1)
    untied = dataclasses.replace(cfg, num_hidden_groups=0)
    copied = {
        **params,
        "layers": jax.tree.map(lambda x: x[np.array(cfg.groups)], params["layers"]),
    }
    batch = make_batch()

    def loss(params, cfg):
        return jnp.sum(jnp.sin(encoder.apply(params, cfg, batch).hidden))

    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    a, shared = gradient(params, cfg)
    b, apart = gradient(copied, untied)
    np.testing.assert_allclose(a, b, rtol=1e-5)
    for one, many in zip(
        *(jax.tree.leaves(g["layers"]) for g in (shared, apart)), strict=True
    ):
        np.testing.assert_allclose(one[0], many[0] + many[1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(one[1], many[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_shared_parameters_do_not_grow_with_depth(groups):
    counts = set()
    for layers in (2, 4, 12):
        cfg = dataclasses.replace(
            CFG, num_hidden_layers=layers, num_hidden_groups=groups
        )
        made = jax.eval_shape(lambda cfg=cfg: encoder.init(jax.random.key(0), cfg))
        counts.add(encoder.count_params(made))
        assert cfg.groups == tuple(int(i / (layers / groups)) for i in range(layers))
    assert len(counts) == 1


def test_the_first_layer_without_a_norm_has_no_leaf():
    def norms(layers):
        cfg = dataclasses.replace(CFG, **MODERN, num_hidden_layers=layers)
        made = INIT(jax.random.key(0), cfg)
        assert np.isfinite(apply(made, cfg, make_batch()).hidden).all()
        return made["layers"]["attention"].get("norm")

    assert norms(3)["scale"].shape == (2, 16)
    assert norms(2)["scale"].shape == (1, 16)
    assert norms(1) is None


# ---------------------------------------------------------------- positions, windows
def test_a_window_by_hand():
    real = jnp.array([[1, 1, 1, 0, 0]])
    mask = np.broadcast_to(AttentionMask(real, window=3).boolean[0, 0], (5, 5))
    expected = [
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],  # padding too far from all others sees itself
    ]
    np.testing.assert_array_equal(mask, np.array(expected, bool))
    packed = AttentionMask(jnp.array([[1, 1, 2, 2, 0]]), True, window=9).boolean
    same = np.equal.outer([1, 1, 2, 2, 0], [1, 1, 2, 2, 0])
    np.testing.assert_array_equal(packed[0, 0], same)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", ["local", "local_global", "modernbert"])
def test_a_token_moves_its_window_and_no_more(name, layers):
    """Each layer extends the reach by its window; a global layer (the first of every
    two or three) reaches all tokens."""
    cfg = dataclasses.replace(CFG, **OPTIONS[name], num_hidden_layers=layers)
    params = with_options(name)[1]
    params["layers"] = jax.tree.map(
        lambda x: x[: layers if len(x) == 3 else layers - 1], params["layers"]
    )
    if name == "modernbert" and layers == 1:
        del params["layers"]["attention"]["norm"]
    batch = make_batch(1)
    before = apply(params, cfg, batch).hidden
    changed = dict(batch, input_ids=batch["input_ids"].copy())
    changed["input_ids"][0, 5] = (changed["input_ids"][0, 5] + 1) % V
    moved = np.abs(apply(params, cfg, changed).hidden - before)[0].max(-1) > 0
    reach = 3 * layers if name == "local" else L
    np.testing.assert_array_equal(moved, np.abs(np.arange(L) - 5) <= reach)


def test_rotary_positions_are_relative():
    cfg, params = with_options("two_bases")
    batch = make_batch()
    at = np.tile(np.arange(L, dtype=np.int32), (3, 1))
    real = batch["attention_mask"] > 0
    plain = apply(params, cfg, batch).hidden[real]
    np.testing.assert_allclose(
        apply(params, cfg, dict(batch, position_ids=at)).hidden[real], plain, atol=1e-6
    )
    moved = apply(params, cfg, dict(batch, position_ids=at + 100)).hidden[real]
    np.testing.assert_allclose(moved, plain, atol=1e-4)
    turned = apply(params, cfg, dict(batch, position_ids=2 * at)).hidden[real]
    assert np.abs(turned - plain).max() > 1e-3
    same = dataclasses.replace(cfg, local_rope_theta=0.0)
    assert np.abs(apply(params, same, batch).hidden[real] - plain).max() > 1e-3


def test_without_positions_order_does_not_matter():
    cfg, params = with_options("none")
    batch = make_batch(1)
    back = {key: value[:, ::-1] for key, value in batch.items()}
    a, b = (apply(params, cfg, x).hidden for x in (batch, back))
    np.testing.assert_allclose(a[:, ::-1], b, atol=1e-5)


# ---------------------------------------------------------------- families
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_the_families_are_whole(family):
    known = FAMILIES[family]
    for size, shape in known.sizes.items():
        options = {"intermediate_size": 4 * shape["hidden_size"], **known.fixed}
        cfg = EncoderConfig(vocab_size=99, **{**options, **shape})
        assert cfg.head_dim in (64, 96, 128), size  # 96: PLATO-XL
        assert cfg.max_length in (512, 1024, 8192, 2**24)  # T5 has no limit
        assert flops_per_token(cfg, 128, 20) > 0


def test_flops_count_windows_gates_and_projections():
    cfg = EncoderConfig(
        vocab_size=1000,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=1,
        intermediate_size=96,
        mlp_type="glu",
        embedding_size=32,
        local_attention=8,
        global_attn_every_n_layers=3,
    )
    inside = 4 * (4 * 64 * 64 + 3 * 64 * 96) + 32 * 64
    keys = 2 * 64 * (100 + 9 + 9 + 100)
    head = (64 * 32 + 1000 * 32) * 10 / 100
    assert flops_per_token(cfg, 100, 10) == pytest.approx(6 * (inside + keys + head))
