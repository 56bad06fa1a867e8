# SPDX-License-Identifier: Apache-2.0
"""CugLM: attention, types before tokens, losses, and the count of completions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_encoder
from host_half import make_half

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.features.base import GatheredRows
from bertjax.measuring.synthetic_data import synthetic_tokenizer
from bertjax.models import encoder
from bertjax.models.typed_head import init_typed, typed_logits
from bertjax.objectives import cuglm
from bertjax.objectives.base import TokenIds
from bertjax.objectives.losses import cross_entropy
from bertjax.objectives.make_objective import make_objective

V, L, R, B, TYPES = 50, 40, 20, 6, 9
CFG = tiny_encoder(V, L, hidden_size=32, num_hidden_layers=3, intermediate_size=64)
TOKENIZER = synthetic_tokenizer(V)
TOKENS = dataclasses.replace(TokenIds.of(TOKENIZER), streams=(("type", TYPES),))
READ = "input_ids attention_mask token_type_ids segment_ids position_ids"
READ = (*READ.split(), "attention_steps")
UNK = TOKENIZER.unk_id


@functools.cache
def rows(packed=False, causal=False):
    """Make rows with names of one and two tokens, some of them unknown."""
    half = make_half(f"cuglm:causal={int(causal)}", TOKENIZER, L, rate=0.3)
    used = np.array([R, R, R - 1, 17, 9, 6])[:, None]
    real = np.arange(R) < used
    draw = counter_rng.fold(3, np.arange(B))[:, None]
    ids = 5 + counter_rng.below(draw, np.arange(R), V - 5)
    ids[:, 4] = UNK
    ids = np.where(real, ids, TOKENIZER.pad_id)
    ids[:, 0] = TOKENIZER.cls_id
    np.put_along_axis(ids, used - 1, TOKENIZER.sep_id, 1)
    types = np.tile([0, 3, 3, 0, 5, 0, 1, 2], 3)[:R] * real
    arrays = {"attention_mask": real, "token_type_ids": (ids % 2) * real}
    if packed:
        first = used // 2
        np.put_along_axis(ids, first, TOKENIZER.cls_id, 1)
        second = np.arange(R) >= first
        arrays["segment_ids"] = (1 + second) * real
        arrays["position_ids"] = (np.arange(R) - first * second) * real
        arrays["cls_positions"] = np.concatenate([0 * first, first], axis=1)
        arrays["cls_weights"] = np.ones((B, 2))
    labels = np.arange(2 * B).reshape(B, 2) % 2
    arrays["nsp_labels"] = labels if packed else labels[:, 0]
    arrays |= {"input_ids": ids, "type_ids": types}
    arrays = {k: v.astype(np.int32) for k, v in arrays.items()}
    if packed:
        arrays["cls_weights"] = arrays["cls_weights"].astype(np.float32)
    n = np.arange(B)
    batch = half.make(GatheredRows(arrays, draw[:, 0], n, n))
    assert (batch["mlm_weights"].sum(axis=1) > 0).all()
    return batch


@functools.cache
def make(options=""):
    return make_objective(f"cuglm{options}", CFG, TOKENS)


@functools.cache
def parameters():
    """Make enlarged parameters, so that visible tokens have an effect."""

    def enlarge(path, x):
        name = jax.tree_util.keystr(path)
        return x * (5 if "kernel" in name or "types" in name else 1)

    params = make()[0].init(jax.random.key(0))
    return jax.tree_util.tree_map_with_path(enlarge, params)


@functools.cache
def program():
    cfg = dataclasses.replace(CFG, pooler=False)
    return jax.jit(lambda params, batch: encoder.apply(params, cfg, batch).hidden)


def encode(batch):
    own = {name: batch[name] for name in READ}
    return np.asarray(program()(parameters()["encoder"], own))


def other_ids(batch, where):
    ids = batch["input_ids"]
    return batch | {"input_ids": np.where(where, (ids + 11) % V, ids)}


cases = pytest.mark.parametrize("packed", [False, True])


# ---------------------------------------------------------------- who sees whom
@cases
@pytest.mark.parametrize("causal", [False, True])
def test_a_later_token_changes_no_earlier_prediction(packed, causal):
    """With three layers, bit for bit; the released code leaks from the second on."""
    batch = rows(packed, causal)
    whole, slots = encode(batch), np.arange(L)
    copies = [slots >= R, slots < R] if causal else [slots >= R]
    moved = 0
    for copy in copies:
        base = R if copy[R] else 0
        for place in (1, 7, 15):
            changed = (slots == base + place) & (batch["attention_mask"] > 0)
            other = encode(other_ids(batch, changed))
            before = copy & (slots < base + place)
            assert (other[:, before] == whole[:, before]).all()
            moved += (np.abs(other - whole).max(axis=2)[changed] > 1e-3).sum()
    assert moved > 10


@cases
def test_copies_see_nothing_of_each_other(packed):
    batch = rows(packed)
    whole, slots = encode(batch), np.arange(L)
    for copy in (slots < R, slots >= R):
        other = encode(other_ids(batch, np.broadcast_to(copy, (B, L))))
        real = batch["attention_mask"] > 0
        assert (other[real & ~copy] == whole[real & ~copy]).all()
        assert (np.abs(other - whole).max(axis=2)[real & copy] > 1e-3).mean() > 0.9


def test_the_clean_copy_is_an_ordinary_decoder():
    """Its states are the same alone and without attention_steps, as in generate."""
    batch = rows()
    own = {n: batch[n][:, R:] for n in ("input_ids", "attention_mask")}
    own["token_type_ids"] = batch["token_type_ids"][:, R:]
    cfg = dataclasses.replace(CFG, is_decoder=True, pooler=False)
    alone = encoder.apply(parameters()["encoder"], cfg, own).hidden
    real = own["attention_mask"] > 0
    np.testing.assert_allclose(alone[real], encode(batch)[:, R:][real], atol=2e-6)


# ---------------------------------------------------------------- types, then tokens
def typed(changes=None, types=None, by_type=True):
    params = init_typed(jax.random.key(1), CFG, TYPES, by_type)
    params = jax.tree.map(lambda x: 5 * x, params) | (changes or {})
    word = parameters()["encoder"]["embeddings"]["word"]
    x = jax.random.normal(jax.random.key(2), (2, 8, CFG.hidden_size))
    return params, *typed_logits(params, word, CFG, x, types)


def test_types_act_on_tokens_by_the_likeliest_ones_embedding_alone():
    params, types, tokens = typed()
    best = np.asarray(types.argmax(-1))
    unused = np.setdiff1d(np.arange(TYPES), best)
    assert unused.size and len(np.unique(best)) > 1
    # Embeddings of types that are never the likeliest do not change tokens.
    table = params["types"].at[unused].multiply(0.9)
    _, changed, same = typed({"types": table})
    assert (np.asarray(changed.argmax(-1)) == best).all() and (changed != types).any()
    np.testing.assert_array_equal(same, tokens)
    # A bias that makes another type the likeliest gives the tokens of that type.
    bias = params["type_bias"].at[unused[0]].set(1e3)
    forced = typed({"type_bias": bias})[2]
    given = typed(types=jnp.full(best.shape, unused[0]))[2]
    assert (forced != tokens).any()
    np.testing.assert_array_equal(forced, given)


def test_no_gradient_goes_through_the_choice():
    params, _, _ = typed()
    word = parameters()["encoder"]["embeddings"]["word"]
    x = jax.random.normal(jax.random.key(2), (2, 8, CFG.hidden_size))

    def loss(params):
        _, tokens = typed_logits(params, word, CFG, x)
        return cross_entropy(tokens, jnp.full((2, 8), 7), jnp.ones((2, 8))).value

    gradient = jax.grad(loss)(params)
    best = np.unique(typed()[1].argmax(-1))
    assert not np.any(gradient["type_bias"])
    moved = np.abs(gradient["types"]).max(axis=1) > 0
    assert (np.flatnonzero(moved) == best).all()


def test_one_stage_predicts_from_what_types_are_predicted_from():
    params, _, tokens = typed(by_type=False)
    assert "dense" not in params and tokens.shape == (2, 8, V)
    bias = params["type_bias"].at[0].set(1e3)
    np.testing.assert_array_equal(typed({"type_bias": bias}, by_type=False)[2], tokens)


def test_true_types_stand_in_in_training_alone():
    batch = {k: jnp.asarray(v) for k, v in rows().items()}
    params, key = parameters(), jax.random.key(0)
    gold, usual = make(":gold=true")[0], make()[0]
    run = jax.jit(lambda rng: [o.sums(params, batch, rng) for o in (gold, usual)])
    for rng, same in ((None, True), (key, False)):
        one, other = run(rng)
        assert (one["mlm_loss"].value == other["mlm_loss"].value) == same


# ---------------------------------------------------------------- losses, completions
@cases
def test_losses_are_added_up_and_unknown_tokens_never_learnt(packed):
    objective, cfg = make()
    batch = rows(packed)
    assert cfg.pooler and objective.needs == {"cuglm:causal=0", "nsp"}
    weights = objective.weights({k: jnp.asarray(v) for k, v in batch.items()})
    known = batch["mlm_weights"] * (batch["mlm_ids"] != UNK)
    assert weights["mlm_loss"] == known.sum() < batch["mlm_weights"].sum()
    of_types = batch["mlm_weights"] * (batch["mlm_types"] > 1)
    assert weights["type_loss"] == of_types.sum() < batch["mlm_weights"].sum()
    following = batch["lm_weights"] * (batch["lm_ids"] != UNK)
    assert weights["lm_loss"] == following.sum() < batch["lm_weights"].sum()
    assert weights["nsp_loss"] == (2 * B if packed else B)
    assert {*weights} == {"mlm_loss", "type_loss", "lm_loss", "nsp_loss"}
    coefficients = {objective.coefficients.get(term, 1.0) for term in weights}
    assert coefficients == {1.0}
    run = jax.jit(objective.sums)
    sums = run(parameters(), batch, None)
    assert sums["token_top1"].weight == batch["lm_weights"].sum()
    assert sums["token_top1_known"] == sums["lm_accuracy"]
    for what in ("token", "name", "masked_name"):
        one, five = sums[f"{what}_top1"], sums[f"{what}_top5"]
        assert 0 <= one.value <= five.value < five.weight
        assert sums[f"{what}_top5_known"].weight < five.weight
        assert sums[f"{what}_top5_known"].value == five.value
    training = jax.eval_shape(run, parameters(), batch, jax.random.key(0))
    assert not any("top" in term for term in training)


def test_finetuning_says_nothing_of_segments():
    objective, cfg = make(":causal=true")
    assert not cfg.pooler and objective.needs == {"cuglm:causal=1"}
    params = objective.init(jax.random.key(0))
    assert params.keys() == {"encoder", "mlm", "cuglm"}
    alone, _ = make(":stages=1,types=0.0,nsp=false")
    assert {*alone.weights(rows())} == {"mlm_loss", "lm_loss"}


def test_whole_names_are_counted():
    """The names have tokens of ranks 0 and 3; 7; 0; 0 and 0, with an unknown token."""
    batch = {
        "lm_names": [[1, 1, 0, 2], [0, 1, 2, 2]],
        "lm_ids": [[9, 9, 9, 9], [9, 9, UNK, 9]],
    }
    batch = {k: jnp.array(v) for k, v in batch.items()}
    batch["lm_weights"] = jnp.ones((2, 4))
    rank = jnp.array([[0, 3, 50, 7], [1, 0, 0, 0]])
    found = cuglm.name_completions("name", rank, batch, "lm", UNK)
    got = {name: (float(s.value), float(s.weight)) for name, s in found.items()}
    assert got == {
        "name_top1": (1, 4), "name_top5": (2, 4),
        "name_top1_known": (1, 3), "name_top5_known": (2, 3),
    }  # fmt: skip
    none = {**batch, "lm_weights": jnp.zeros((2, 4))}
    found = cuglm.name_completions("name", rank, none, "lm", UNK)
    assert all(s.value == s.weight == 0 for s in found.values())


def test_ranks_count_what_is_likelier():
    logits = jnp.array([[[3.0, 1.0, 2.0, 2.0]]])
    for token, rank in enumerate([0, 3, 1, 1]):
        assert cuglm.ranks(logits, jnp.array([[token]]))[0, 0] == rank
    # A model with NaN logits must not seem to complete everything.
    assert cuglm.ranks(jnp.nan * logits, jnp.array([[0]]))[0, 0] == 4


def test_pieces_of_logits_change_nothing():
    batch = rows()
    many = dataclasses.replace(CFG, vocab_size=20_000, max_logits_mb=1)
    whole = dataclasses.replace(many, max_logits_mb=0)
    objectives = [make_objective("cuglm", cfg, TOKENS)[0] for cfg in (many, whole)]
    params = objectives[0].init(jax.random.key(0))
    one, other = (jax.jit(o.sums)(params, batch, None) for o in objectives)
    for term in one:
        np.testing.assert_allclose(one[term].value, other[term].value, rtol=1e-5)


@pytest.mark.parametrize(
    "options, said",
    [
        (":stages=3", "stages=3 must be 1 or 2"),
        (":types=0.0", "in two stages above 0"),
        (":stages=1,gold=true", "no effect with stages=1"),
        (":leak=1", "option of .*leak.* is unknown"),
    ],
)
def test_options_that_do_not_go_together(options, said):
    with pytest.raises(UserError, match=said):
        make_objective(f"cuglm{options}", CFG, TOKENS)


def test_decoders_are_refused():
    with pytest.raises(UserError, match="is_decoder=True: cuglm says itself"):
        make_objective("cuglm", dataclasses.replace(CFG, is_decoder=True))
