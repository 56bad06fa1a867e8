# SPDX-License-Identifier: Apache-2.0
"""Causal, prefix and masked next-token prediction, and rows mixed in one step."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import train_steps
from host_half import make_half
from test_objectives import CFG, TOKENIZER

from bertjax import UserError
from bertjax.data.features.base import Features, GatheredRows, Spec
from bertjax.data.features.mixed import MixedFeatures
from bertjax.models import encoder
from bertjax.models.heads import mlm_logits
from bertjax.objectives import mlm
from bertjax.objectives.combine import mix_by_rows
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel.mesh import make_mesh

V, B, L = CFG.vocab_size, 16, CFG.max_position_embeddings
DEEP = dataclasses.replace(CFG, num_hidden_layers=3)


def gathered(rows=B, packed=False, seed=0):
    """Make rows of different lengths, packed ones with two sequences."""
    draw = np.random.default_rng(seed)
    real = np.arange(L) < draw.integers(4, L + 1, rows)[:, None]
    ids = np.where(real, draw.integers(5, V, (rows, L)), 0).astype(np.int32)
    ids[:, 0] = 2
    arrays = {
        "input_ids": ids,
        "attention_mask": real.astype(np.int32),
        "token_type_ids": np.zeros_like(ids),
    }
    if packed:
        cut = np.arange(L) >= L // 2
        ids[:, L // 2] = np.where(real[:, L // 2], 2, 0)
        arrays["segment_ids"] = (real * (1 + cut)).astype(np.int32)
        arrays["position_ids"] = (np.arange(L) % (L // 2) * real).astype(np.int32)
    index = np.arange(rows)
    return GatheredRows(arrays, index.astype(np.uint64), index, index, 0.0)


def make_batch(objective, packed=False, rows=B, seed=0, **keys):
    needs = make_objective(objective, CFG)[0].needs
    half = make_half(needs, TOKENIZER, L, **keys)
    return half.make(gathered(rows, packed, seed))


def value(objective, batch, cfg=CFG, params=None):
    """Return the total loss, the losses, the gradient and the parameters."""
    made, cfg = make_objective(objective, cfg)
    params = params or jax.jit(made.init)(jax.random.key(1))

    def loss(params):
        sums, weights = made.sums(params, batch, None), made.weights(batch)
        terms = {t: sums[t].value / weights[t] for t in weights}
        return sum(made.coefficients.get(t, 1.0) * x for t, x in terms.items()), terms

    (total, terms), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return total, terms, grads, params


def close(a, b, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-4, atol), a, b)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype, atol", [("float32", 1e-5), ("bfloat16", 0.06)])
def test_a_causal_loss_is_that_of_step_by_step(packed, dtype, atol):
    """Predict each token in a separate run on only the tokens before it."""
    cfg = dataclasses.replace(DEEP, pooler=False, dtype=dtype)
    batch = make_batch("clm", packed, rows=3)
    _, terms, _, params = value("clm", batch, cfg)
    word = params["encoder"]["embeddings"]["word"]
    total = 0.0
    ids, numbers = batch["input_ids"], batch.get("segment_ids", batch["attention_mask"])
    for row in range(3):
        for i in range(L - 1):
            sequence = numbers[row] == numbers[row, i]
            if not batch["clm_weights"][row, i]:
                continue
            own = np.flatnonzero(sequence & (np.arange(L) <= i))
            alone = np.zeros((1, L), np.int32)
            alone[0, : len(own)] = ids[row, own]
            one = {"input_ids": alone, "attention_mask": (alone > 0).astype(np.int32)}
            one["token_type_ids"] = np.zeros_like(alone)
            # The last token of a causal row sees all real tokens.
            steps = np.arange(1, L + 1, dtype=np.int32) * one["attention_mask"]
            x = ENCODE(params["encoder"], cfg, one | {"attention_steps": steps})
            logits = mlm_logits(params["mlm"], word, cfg, x[:, len(own) - 1][:, None])
            logp = jax.nn.log_softmax(logits[0, 0])
            total -= float(logp[ids[row, i + 1]])
    mean = total / batch["clm_weights"].sum()
    np.testing.assert_allclose(float(terms["clm_loss"]), mean, atol=atol, rtol=1e-5)


ENCODE = jax.jit(lambda p, cfg, b: encoder.apply(p, cfg, b).hidden, static_argnums=1)


def test_a_decoder_is_its_steps():
    """is_decoder, which Head.causal sets, and attention_steps give the same states."""
    cfg = dataclasses.replace(DEEP, pooler=False)
    decoder = dataclasses.replace(cfg, is_decoder=True)
    batch = make_batch("clm", packed=True)
    assert make_objective("clm", cfg)[1] == decoder
    real = batch["segment_ids"] > 0
    steps = np.arange(1, L + 1, dtype=np.int32) * real
    params = encoder.init(jax.random.key(0), cfg)
    a, b = ENCODE(params, decoder, batch), ENCODE(params, cfg, with_steps(batch, steps))
    np.testing.assert_allclose(np.asarray(a)[real], np.asarray(b)[real], atol=2e-6)


def with_steps(batch, steps):
    return batch | {"attention_steps": steps}


def test_the_mask_at_a_place_is_told_from_the_place_before():
    """MNTP is a masked LM whose head reads one position to the left."""
    masked, shifted = make_batch("mlm"), make_batch("mntp")
    assert (masked["input_ids"] == shifted["input_ids"]).all()
    masked["mlm_positions"] = np.maximum(masked["mlm_positions"] - 1, 0)
    a, _, grads, params = value("mlm", masked)
    b, _, others, _ = value("mntp", shifted, params=params)
    close((a, grads), (b, others))


@pytest.mark.parametrize(
    "parts, packed",
    [(("mntp", "clm"), True), (("clm", "mlm"), False), (("prefix", "mlm"), True)],
)
def test_a_mixture_is_the_weighted_sum_of_its_parts(parts, packed):
    """Compare loss and gradient with each part run alone on its own rows."""
    name = f"{parts[0]}*6+{parts[1]}*2"
    batch = make_batch(name, packed)
    total, terms, grads, params = value(name, batch)
    kind = np.arange(B) % 4 == 3  # 3 : 1
    wholes = []
    for part, rows in zip(parts, (~kind, kind), strict=True):
        own = make_batch(part, packed)
        own = {k: v[rows] for k, v in own.items()}
        assert all((batch[k][rows] == v).all() for k, v in own.items())
        wholes.append(value(part, own, params=params))
    shares = (0.75, 0.25)
    loss = sum(s * w[0] for s, w in zip(shares, wholes, strict=True))
    gradient = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, *(w[2] for w in wholes))
    close((total, grads), (loss, gradient))
    close(terms, wholes[0][1] | wholes[1][1])


def test_a_ratio_of_1_to_0_is_that_part_bit_for_bit():
    plain, zero = make_batch("mntp"), make_batch("mntp*1+clm*0")
    assert plain.keys() == zero.keys()
    a, b = value("mntp", plain), value("mntp*1+clm*0", zero)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
    "accumulate, mesh", [(1, dict(data=8)), (2, dict(data=4, fsdp=2))]
)
def test_mixtures_on_any_mesh_and_in_micro_batches(accumulate, mesh):
    objective, _ = make_objective("mntp*1+clm*1", CFG)

    def rows(accumulate):
        half = make_half(objective.needs, TOKENIZER, L, accumulate=accumulate)
        return [half.make(gathered(32, seed=step % 2)) for step in range(4)]

    batches = rows(accumulate)
    same = (batches[0]["mntp_weights"] == rows(1)[0]["mntp_weights"]).all()
    assert same == (accumulate == 1)
    one = make_mesh(devices=jax.devices()[:1])
    whole = train_steps(objective, one, batches, accumulate)
    split = train_steps(objective, make_mesh(**mesh), batches, accumulate)
    close(whole, split, 2e-4)


@pytest.mark.parametrize(
    "name, said",
    [
        ("prefix+nsp", "with prefix the first token sees only its context, and nsp"),
        ("clm+nsp", "with clm the first token sees only itself, and nsp reads"),
        ("clm+distil", "clm predicts the next token, and distil lets tokens see it"),
        ("mntp*3+clm", "each part says how many rows"),
        ("mlm*0+clm*0", "each part says how many rows"),
        ("mlm*1+nsp*1", "nsp cannot have rows of its own"),
    ],
)
def test_what_cannot_be_mixed(name, said):
    with pytest.raises(UserError, match=said):
        make_objective(name, CFG)


@pytest.mark.parametrize(
    "losses, coefficients",
    [(["mine"], {}), (["mine_loss", "other"], {}), (["mine"], {"mine": 2.0})],
)
def test_losses_without_a_known_factor_are_refused(losses, coefficients):
    """Their head's share of the rows would not weigh them."""
    plain = mlm.make_head()
    mine = dataclasses.replace(
        plain,
        name="mine",
        weights=lambda batch: dict.fromkeys(losses, jnp.ones(())),
        coefficients=coefficients,
    )
    with pytest.raises(UserError) as e:
        mix_by_rows([plain, mine], CFG, [3, 1]).weights(make_batch("mlm"))
    assert f"the head mine has the losses {', '.join(losses)}, and" in str(e.value)
    assert "call its loss mine_loss, and name any others in its coef" in str(e.value)


@pytest.mark.parametrize("name", ["mlm", "mntp*15+clm*1", "prefix"])
def test_a_decoder_learns_causally_alone(name):
    decoder = dataclasses.replace(CFG, is_decoder=True)
    with pytest.raises(UserError, match=r"model\.is_decoder=True"):
        make_objective(name, decoder)
    make_objective("clm", decoder)


def test_a_causal_row_by_hand():
    half = make_half("clm", TOKENIZER, 8)
    ids = np.array([[2, 17, 25, 3, 2, 46, 3, 0]], np.int32)
    arrays = {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int32)}
    arrays["segment_ids"] = np.array([[1, 1, 1, 1, 2, 2, 2, 0]], np.int32)
    index = np.arange(1)
    rows = GatheredRows(arrays, index.astype(np.uint64), index, index)
    batch = half.make(rows)
    assert "attention_steps" not in batch
    assert batch["clm_ids"].tolist() == [[17, 25, 3, 0, 46, 3, 0, 0]]
    assert batch["clm_weights"].tolist() == [[1, 1, 1, 0, 1, 1, 0, 0]]
    half = make_half("prefix:least=0.5,most=0.5", TOKENIZER, 8)
    del arrays["segment_ids"]
    ids[0] = [2, 17, 25, 31, 46, 3, 0, 0]
    arrays["attention_mask"] = (ids > 0).astype(np.int32)
    batch = half.make(rows)
    assert batch["attention_steps"].tolist() == [[0, 0, 0, 4, 5, 6, 0, 0]]
    assert batch["prefix_ids"].tolist() == [[0, 0, 31, 46, 3, 0, 0, 0]]
    assert batch["prefix_weights"].tolist() == [[0, 0, 1, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["clm", "prefix"])
def test_what_is_predicted_leaks_nowhere(name, packed):
    """Changing a predicted token changes no prediction of it or of earlier ones."""
    cfg = make_objective(name, DEEP)[1]
    batch = make_batch(name, packed, rows=4)
    params = encoder.init(jax.random.key(0), cfg)
    first = np.asarray(ENCODE(params, cfg, batch))
    steps = np.arange(1, L + 1) * batch["attention_mask"]
    steps = batch.get("attention_steps", steps)
    for row in range(4):
        for at in np.flatnonzero(steps[row] > 0)[1:]:
            other = batch["input_ids"].copy()
            other[row, at] = (other[row, at] - 5 + 7) % (V - 5) + 5
            seen = np.asarray(ENCODE(params, cfg, batch | {"input_ids": other}))
            hidden = steps[row] < steps[row, at]
            if packed:
                numbers = batch["segment_ids"][row]
                hidden |= numbers != numbers[at]
            assert np.abs(seen[row] - first[row])[hidden].max() < 2e-6
            later = (steps[row] > steps[row, at]) & ~hidden
            if later.any():
                assert np.abs(seen[row] - first[row])[later].max() > 1e-4


def test_z_loss_and_a_norm_of_the_rows():
    batch = make_batch("clm")
    total, terms, _, params = value("clm:z_loss=0.01", batch)
    plain, own, _, _ = value("clm", batch, params=params)
    cfg = make_objective("clm", CFG)[1]
    x = encoder.apply(params["encoder"], cfg, batch).hidden
    word = params["encoder"]["embeddings"]["word"]
    logits = mlm_logits(params["mlm"], word, cfg, x)
    squares = jax.nn.logsumexp(logits, -1) ** 2 * batch["clm_weights"]
    z = jnp.sum(squares) / batch["clm_weights"].sum()
    np.testing.assert_allclose(terms["clm_z_loss"], z, rtol=1e-5)
    np.testing.assert_allclose(total, plain + 0.01 * z, rtol=1e-5)
    normed = batch | {"clm_norm": np.full(B, 10, np.float32)}
    _, other, _, _ = value("clm", normed, params=params)
    whole = own["clm_loss"] * batch["clm_weights"].sum() / (10 * B)
    np.testing.assert_allclose(other["clm_loss"], whole, rtol=1e-5)


def test_rows_of_a_kind_without_positions_count_from_0():
    """Only one of two kinds of rows, both from outside, has position_ids and
    text_tokens."""

    class Plain(Features):
        def specs(self, gathered):
            return {"input_ids": Spec((6,)), "attention_mask": Spec((6,))}

        def make(self, rows, drawn=None):
            return {k: rows.arrays[k] for k in ("input_ids", "attention_mask")}

    class Placed(Plain):
        def make(self, rows, drawn=None):
            own = {"position_ids": np.full((len(rows.keys), 6), 7, np.int32)}
            counts = {"text_tokens": np.full(len(rows.keys), 2, np.int32)}
            return super().make(rows) | own | counts

    settings = types.SimpleNamespace(tokenizer=None, length=6, rows=1, streams=())
    parts = [(Plain(settings), 1), (Placed(settings), 1)]
    parts[1][0].streams = frozenset({"role"})
    mixed = MixedFeatures("a*1+b*1", parts, settings)
    assert mixed.streams == {"role"}  # rows have the streams that any part reads
    ids, real = np.arange(24).reshape(4, 6), np.tile([1, 1, 1, 1, 0, 0], (4, 1))
    arrays = {"input_ids": ids, "attention_mask": real}
    at = np.arange(4)
    batch = mixed.make(GatheredRows(arrays, at.astype(np.uint64), at, at))
    positions = [[*range(6)], [7] * 6] * 2
    assert batch["position_ids"].tolist() == positions
    assert batch["text_tokens"].tolist() == [4, 2, 4, 2]
