# SPDX-License-Identifier: Apache-2.0
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ENCODERS, fetched

from bertjax import UserError
from bertjax.models import encoder, heads, stacked_layers
from bertjax.models.config import EncoderConfig
from bertjax.models.families import SIZES
from bertjax.models.flops import flops_per_token

CFG = EncoderConfig(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=3,
    unroll=1,  # one body: quick to compile
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=24,
    hidden_dropout_prob=0.2,
    attention_probs_dropout_prob=0.2,
)
B, L = 4, 12
LENGTHS = np.array([12, 7, 3, 10])


init = fetched(encoder.init, static_argnums=1)


@pytest.fixture(scope="module")
def params():
    """Parameters large enough for differences to be visible."""
    made = init(jax.random.key(0), CFG)
    return jax.tree.map(lambda x: x * 5 if x.ndim > 2 else x, made)


apply = fetched(encoder.apply, static_argnums=1)


def make_batch(seed=0):
    draw = np.random.default_rng(seed)
    return {
        "input_ids": draw.integers(0, 50, (B, L)).astype(np.int32),
        "attention_mask": (np.arange(L) < LENGTHS[:, None]).astype(np.int32),
        "token_type_ids": draw.integers(0, 2, (B, L)).astype(np.int32),
    }


def loss(params, cfg, batch, rng=None):
    return jnp.sum(encoder.apply(params, cfg, batch, rng).hidden ** 2 * 0.01)


grad = fetched(jax.grad(loss), static_argnums=1)


# ---------------------------------------------------------------- sizes
def formula(size, vocab=30522, positions=512, types=2):
    """Compute the number of parameters, with the pooler, from the published shapes."""
    d, n = size["hidden_size"], size["num_hidden_layers"]
    embeddings = (vocab + positions + types) * d + 2 * d
    attention = 4 * (d * d + d)
    mlp = d * 4 * d + 4 * d + 4 * d * d + d
    return embeddings + n * (attention + mlp + 4 * d) + d * d + d


@pytest.mark.parametrize(
    "size, published",
    [
        ("tiny", 4_385_920),
        ("mini", 11_170_560),
        ("small", 28_763_648),
        ("medium", 41_373_184),
        ("base", 109_482_240),
        ("large", 335_141_888),
    ],
)
def test_parameter_counts(size, published):
    shape = SIZES[size]
    cfg = EncoderConfig(
        vocab_size=30522, intermediate_size=4 * shape["hidden_size"], **shape
    )
    made = jax.eval_shape(lambda: encoder.init(jax.random.key(0), cfg))
    assert encoder.count_params(made) == published == formula(shape)
    assert cfg.head_dim == 64
    without = encoder.without_pooler(cfg)
    made = jax.eval_shape(lambda: encoder.init(jax.random.key(0), without))
    d = cfg.hidden_size
    assert encoder.count_params(made) == published - d * d - d


def test_initial_values():
    cfg = dataclasses.replace(CFG, hidden_size=128, num_attention_heads=2)
    made = init(jax.random.key(1), cfg)
    for path, leaf in jax.tree_util.tree_leaves_with_path(made):
        name = path[-1].key
        assert leaf.dtype == jnp.float32
        if name == "scale":
            assert (leaf == 1).all()
        elif name == "bias":
            assert (leaf == 0).all()
        else:  # a normal truncated at 2 deviations has 0.88 of its deviation
            assert float(np.abs(leaf).max()) <= 0.04
    word = made["embeddings"]["word"]
    assert abs(float(word.std()) - 0.02 * 0.8796) < 5e-4
    assert abs(float(word.mean())) < 1e-3
    again = init(jax.random.key(1), cfg)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), made, again))


def test_task_heads_are_drawn_uncut():
    cfg = dataclasses.replace(CFG, hidden_size=512, task_transform=True)
    made = heads.init_task(jax.random.key(2), cfg, classes=64)
    classes = np.asarray(made["kernel"])  # 32,768 numbers
    assert abs(classes.std() - 0.02) < 3e-4
    assert abs((np.abs(classes) > 0.04).mean() - 0.0455) < 5e-3  # an untruncated normal
    assert 0.06 < np.abs(classes).max() < 0.12
    assert np.abs(np.asarray(made["transform"]["kernel"])).max() <= 0.04


def test_flops_of_base():
    cfg = EncoderConfig(vocab_size=30522, intermediate_size=3072, **SIZES["base"])
    inside = 12 * (4 * 768**2 + 2 * 768 * 3072)  # weights of matrix products
    scores = 12 * 12 * 768 * 128
    head = 6 * (768**2 + 768 * 30522) * 20 / 128
    assert flops_per_token(cfg, 128, 20) == pytest.approx(6 * inside + scores + head)
    # The last layer runs at 20 of 128 tokens and at [CLS], but for keys and values.
    spared = (2 * 768**2 + 2 * 768 * 3072) * (1 - 21 / 128)
    kept = 12 * 768 * 128 * (11 + 21 / 128)
    found = flops_per_token(cfg, 128, 20, everywhere=False)
    assert found == pytest.approx(6 * (inside - spared) + kept + head)


@pytest.mark.parametrize(
    "change, word",
    [
        (dict(num_attention_heads=3), "num_attention_heads"),
        (dict(hidden_act="gelo"), "did you mean 'gelu'"),
        (dict(remat="ful"), "did you mean 'full'"),
        (dict(dtype="float64"), "dtype"),
        (dict(hidden_dropout_prob=1.0), "hidden_dropout_prob"),
        (dict(num_hidden_layers=0), "num_hidden_layers"),
        (dict(unroll=-1), "unroll"),
    ],
)
def test_bad_shapes_are_refused(change, word):
    with pytest.raises(UserError, match=word):
        dataclasses.replace(CFG, **change)


# ---------------------------------------------------------------- visibility
def test_padding_changes_nothing(params):
    """Other tokens and types at padding, and more padding, change no real token."""
    batch = make_batch()
    real = batch["attention_mask"] > 0
    before = apply(params, CFG, batch)
    other = dict(batch)
    for name, top in (("input_ids", 50), ("token_type_ids", 2)):
        other[name] = np.where(real, batch[name], (batch[name] + 1) % top)
    after = apply(params, CFG, other)
    np.testing.assert_array_equal(before.hidden[real], after.hidden[real])
    np.testing.assert_array_equal(before.pooled, after.pooled)
    longer = {k: np.pad(v, ((0, 0), (0, 8))) for k, v in batch.items()}
    after = apply(params, CFG, longer)
    np.testing.assert_allclose(
        before.hidden[real], after.hidden[:, :L][real], atol=2e-6
    )


def test_every_real_token_is_seen(params):
    """Changing a real token changes all real positions of its row, and no other row."""
    batch = make_batch()
    before = apply(params, CFG, batch).hidden
    other = dict(batch, input_ids=batch["input_ids"].copy())
    other["input_ids"][1, 6] = (other["input_ids"][1, 6] + 1) % 50
    moved = np.abs(apply(params, CFG, other).hidden - before).max(-1) > 0
    assert moved[1, :7].all()
    assert not moved[0].any() and not moved[2:].any()


def test_a_row_without_tokens_is_finite(params):
    batch = make_batch()
    batch["attention_mask"][2] = 0
    grads = grad(params, CFG, batch)
    assert jax.tree.all(jax.tree.map(lambda g: np.isfinite(g).all(), grads))


def test_positions_and_types_by_default(params):
    batch = make_batch()
    plain = apply(params, CFG, batch).hidden
    told = dict(batch, position_ids=np.tile(np.arange(L, dtype=np.int32), (B, 1)))
    np.testing.assert_array_equal(plain, apply(params, CFG, told).hidden)
    told["position_ids"] = told["position_ids"][:, ::-1]
    assert np.abs(plain - apply(params, CFG, told).hidden).max() > 1e-3
    zeros = dict(batch, token_type_ids=np.zeros((B, L), np.int32))
    without = {k: v for k, v in batch.items() if k != "token_type_ids"}
    np.testing.assert_array_equal(
        apply(params, CFG, zeros).hidden,
        apply(params, CFG, without).hidden,
    )


def test_no_token_types():
    cfg = dataclasses.replace(CFG, type_vocab_size=0)
    made = init(jax.random.key(0), cfg)
    assert "token_type" not in made["embeddings"]
    batch = make_batch()
    zero = {**made, "embeddings": {**made["embeddings"]}}
    zero["embeddings"]["token_type"] = jnp.zeros((2, 16))
    np.testing.assert_array_equal(
        apply(made, cfg, batch).hidden, apply(zero, CFG, batch).hidden
    )


def test_a_mask_of_another_shape_is_refused(params):
    batch = make_batch()
    batch["attention_mask"] = batch["attention_mask"][:, None]
    with pytest.raises(ValueError, match="attention_mask has shape"):
        apply(params, CFG, batch)


@pytest.mark.parametrize("groups", [3, 1], ids=["own layers", "shared"])
@pytest.mark.parametrize("unroll", [0, 1])
def test_parameters_may_be_numpy_arrays(groups, unroll):
    cfg = dataclasses.replace(CFG, num_hidden_groups=groups, unroll=unroll)
    made = encoder.init(jax.random.key(0), cfg)
    expected = encoder.apply(made, cfg, make_batch()).hidden
    found = encoder.apply(jax.device_get(made), cfg, make_batch()).hidden
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- dropout
def test_dropout_off_without_a_key(params):
    batch = make_batch()
    none = dataclasses.replace(
        CFG, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    plain = apply(params, CFG, batch).hidden
    np.testing.assert_array_equal(plain, apply(params, none, batch).hidden)
    rng = jax.random.key(3)
    np.testing.assert_array_equal(plain, apply(params, none, batch, rng).hidden)
    text = str(jax.make_jaxpr(lambda p: encoder.apply(p, CFG, batch).hidden)(params))
    assert "random_bits" not in text


@pytest.mark.parametrize("which", ["hidden", "attention_probs"])
def test_dropout_follows_its_key(params, which):
    batch = make_batch()
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    rates[f"{which}_dropout_prob"] = 0.3
    cfg = dataclasses.replace(CFG, **rates)

    def run(rng):
        return apply(params, cfg, batch, rng).hidden

    a, again, b = (run(jax.random.key(s)) for s in (1, 1, 2))
    np.testing.assert_array_equal(a, again)
    assert np.abs(a - b).max() > 1e-3
    assert np.abs(a - apply(params, cfg, batch).hidden).max() > 1e-3


def test_layers_and_places_drop_apart(params, monkeypatch):
    """No two dropouts of a forward pass share a key."""
    seen = []

    def spy(x, rate, rng, rows=None):
        if rng is not None:
            seen.append(tuple(jax.random.key_data(rng).tolist()))
        return x

    for module in ("embeddings", "transformer_layer", "attention"):
        monkeypatch.setattr(f"bertjax.models.{module}.dropout", spy)
    with jax.disable_jit():
        unrolled = dataclasses.replace(CFG, unroll=0)
        encoder.apply(params, unrolled, make_batch(), jax.random.key(0))
    assert len(seen) == len(set(seen)) == 1 + 3 * CFG.num_hidden_layers


# ---------------------------------------------------------------- options
@pytest.mark.parametrize(
    "change",
    [
        dict(remat="dots"),
        dict(unroll=2),
        pytest.param(dict(remat="full"), marks=pytest.mark.slow),
        pytest.param(dict(unroll=0), marks=pytest.mark.slow),
    ],
)
def test_remat_and_unroll_change_no_gradient(params, change):
    batch, rng = make_batch(), jax.random.key(5)
    grads = grad(params, CFG, batch, rng)
    other_grads = grad(params, dataclasses.replace(CFG, **change), batch, rng)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        grads,
        other_grads,
    )


def test_bfloat16_stays_near(params):
    batch = make_batch()
    half = dataclasses.replace(CFG, dtype="bfloat16")
    full, low = (apply(params, c, batch) for c in (CFG, half))
    assert low.hidden.dtype == low.pooled.dtype == jnp.bfloat16
    error = np.abs(full.hidden - low.hidden.astype(jnp.float32))
    assert float(error.mean()) < 0.02 and float(error.max()) < 0.3
    grads = grad(params, half, batch)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    "name, packed, change",
    [
        ("bert", True, {}),
        ("bert", False, dict(remat="full", unroll=1, num_hidden_layers=3)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("bert", False, {}),
                ("local", False, {}),
                ("shared", False, {}),
                ("bert", False, dict(num_hidden_layers=1)),
                ("bert", True, dict(attention="splash", pooler=False)),
                ("local", True, dict(pooler=False)),
            )
        ),
    ],
)
def test_hidden_at_positions_alone(name, packed, change):
    """Values and gradients are the same as with the last layer computed everywhere."""
    length = 128 if "attention" in change else L
    sizes = dict(vocab_size=50, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(max_position_embeddings=128, hidden_size=16, intermediate_size=32)
    options = sizes | ENCODERS[name] | change
    cfg = EncoderConfig(**options, initializer_range=0.3)
    params = init(jax.random.key(1), cfg)
    batch = {k: np.pad(v, ((0, 0), (0, length - L))) for k, v in make_batch().items()}
    if packed:
        numbers = np.where(np.arange(length) < 5, 1, 2)
        batch["segment_ids"] = numbers * batch.pop("attention_mask")
        batch["position_ids"] = np.tile(np.arange(length) % 5, (B, 1)).astype(np.int32)
        batch["cls_positions"] = np.tile(np.int32([0, 5]), (B, 1))
    at = np.array([[0, 4, 2], [6, 0, 5], [2, 1, 0], [9, 5, 5]], np.int32)

    def pull(encoded):
        return sum(jnp.sum(jnp.sin(3 * x)) for x in jax.tree.leaves(encoded))

    def everywhere(params):
        hidden, pooled = encoder.apply(params, cfg, batch)
        encoded = jnp.take_along_axis(hidden, at[..., None], axis=1), pooled
        return pull(encoded), encoded

    def alone(params):
        encoded = tuple(encoder.apply(params, cfg, batch, at=at))
        return pull(encoded), encoded

    runs = [jax.jit(jax.value_and_grad(f, has_aux=True)) for f in (everywhere, alone)]
    (whole, found) = (run(params) for run in runs)
    assert found[0][1][0].shape == (B, 3, 16)
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(near, found, whole)
    # Serving one text at a time gives each layer its own arrays (unstacked).
    held = stacked_layers.unstack(params, cfg)
    hidden = jax.jit(lambda p: encoder.apply(p, cfg, batch, at=at).hidden)(held)
    near(hidden, found[0][1][0])


def test_a_mean_is_of_all_tokens(params):
    cfg = dataclasses.replace(CFG, classifier_pooling="mean")
    with pytest.raises(ValueError, match="mean"):
        encoder.apply(params, cfg, make_batch(), at=np.zeros((B, 1), np.int32))
