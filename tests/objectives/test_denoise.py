# SPDX-License-Identifier: Apache-2.0
"""The loss of an encoder-decoder: which tokens count, and which are not visible."""

import dataclasses

import jax
import numpy as np
import pytest
from scipy.special import logsumexp

from bertjax import UserError
from bertjax.data.features.base import Spec
from bertjax.models import decoder, heads
from bertjax.models.config import EncoderConfig
from bertjax.models.flops import decoder_flops, encoder_flops
from bertjax.objectives import token_head
from bertjax.objectives.make_objective import make_objective
from bertjax.training.step import make_eval_step

V, B, L, T = 40, 3, 12, 7
RATES = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
CFG = EncoderConfig(
    V, 16, 2, 2, 32, num_decoder_layers=2, type_vocab_size=0,
    classifier_transform=False, max_position_embeddings=32, unroll=1, **RATES,
)  # fmt: skip


def batch(seed=0):
    draw = np.random.default_rng(seed)
    read, written = np.array([12, 5, 9]), np.array([7, 3, 5])
    real = (np.arange(T) < written[:, None]).astype(np.int32)
    ids = draw.integers(5, V, (B, T)) * real
    before = np.concatenate([np.zeros((B, 1), int), ids[:, :-1]], axis=1)
    mask = (np.arange(L) < read[:, None]).astype(np.int32)
    arrays = {
        "input_ids": draw.integers(5, V, (B, L)) * mask,
        "attention_mask": mask,
        "decoder_input_ids": before,
        "decoder_attention_mask": real,
        "lm_ids": ids,
        "text_tokens": read,
    }
    whole = {k: np.asarray(v, np.int32) for k, v in arrays.items()}
    return {**whole, "lm_weights": np.asarray(real, np.float32)}


def made(options="", cfg=CFG):
    return make_objective(f"denoise{options}", cfg)


@pytest.fixture(scope="module")
def params():
    return jax.jit(made()[0].init)(jax.random.key(0))


def test_the_loss_is_the_mean_over_the_target(params, monkeypatch):
    objective, cfg = made(":z_loss=0.1")
    rows = batch()

    @jax.jit
    def guess(params):
        memory = decoder.encode(params, cfg, rows)
        hidden = decoder.apply(params, cfg, rows, memory)
        word = params["encoder"]["embeddings"]["word"]
        return heads.mlm_logits(params["mlm"], word, cfg, hidden)

    logits = np.asarray(guess(params))
    norms = logsumexp(logits, -1)
    chosen = np.take_along_axis(logits, rows["lm_ids"][..., None], -1)
    each, weights = norms - chosen[..., 0], rows["lm_weights"]
    terms = jax.jit(objective.sums)(params, rows, None)
    assert float(terms["denoise_loss"].value) == pytest.approx(
        float((each * weights).sum()), rel=1e-5
    )
    right = (logits.argmax(-1) == rows["lm_ids"]) * weights
    assert float(terms["denoise_accuracy"].value) == float(right.sum())
    z = norms**2 * weights
    assert float(terms["denoise_z_loss"].value) == pytest.approx(
        float(z.sum()), rel=1e-5
    )
    assert objective.coefficients == {"denoise_z_loss": 0.1}
    known = objective.weights(rows)
    assert {*known} == {"denoise_loss", "denoise_z_loss"}
    assert all(float(weight) == 15 for weight in known.values())
    values = jax.jit(make_eval_step(objective.sums, objective.weights))(params, rows)
    assert {*values} >= {*terms}
    # Logits computed in pieces give the same terms.
    monkeypatch.setattr(token_head, "count_chunks", lambda *sizes: 3)
    pieces = jax.jit(lambda params, rows: objective.sums(params, rows, None))
    for name, term in pieces(params, rows).items():
        assert float(term.value) == pytest.approx(float(terms[name].value), rel=1e-5)


def test_padding_and_empty_rows_change_nothing(params):
    objective, _ = made()
    rows = batch()
    loss = jax.jit(
        lambda params, rows: objective.sums(params, rows, None)["denoise_loss"].value
    )
    before = loss(params, rows)
    dirty = dict(rows)
    for side in ("", "decoder_"):
        real = rows[f"{side}attention_mask"] > 0
        dirty[f"{side}input_ids"] = np.where(real, rows[f"{side}input_ids"], 7)
    assert float(loss(params, dirty)) == pytest.approx(float(before), rel=1e-6)
    none = {**rows, "lm_weights": np.zeros_like(rows["lm_weights"])}
    gradient = jax.jit(jax.grad(loss))(params, none)
    assert all(float(np.abs(g).max()) == 0 for g in jax.tree.leaves(gradient))


def test_packed_rows_are_their_texts_one_by_one(params):
    objective, _ = made()
    rows = batch()
    packed = {}
    sizes = {"": [5, 9], "decoder_": [3, 5]}
    for side, width in (("", 16), ("decoder_", 10)):
        segments = np.repeat([1, 2], sizes[side])
        places = np.concatenate([np.arange(n) for n in sizes[side]])
        ids = [rows[f"{side}input_ids"][i + 1, :n] for i, n in enumerate(sizes[side])]
        for name, values in (
            ("input_ids", np.concatenate(ids)), ("segment_ids", segments),
            ("position_ids", places), ("attention_mask", np.ones(len(places), int)),
        ):  # fmt: skip
            padded = np.pad(values, (0, width - len(values)))
            packed[f"{side}{name}"] = np.asarray(padded[None], np.int32)
    target = np.concatenate([rows["lm_ids"][1, :3], rows["lm_ids"][2, :5]])
    packed["lm_ids"] = np.pad(target, (0, 2))[None].astype(np.int32)
    packed["lm_weights"] = (packed["decoder_segment_ids"] > 0).astype(np.float32)
    alone = {k: v[1:] for k, v in rows.items()}
    sums = jax.jit(lambda params, rows: objective.sums(params, rows, None))
    a, b = (sums(params, x)["denoise_loss"] for x in (packed, alone))
    assert float(a.value) == pytest.approx(float(b.value), rel=1e-5)
    assert float(a.weight) == float(b.weight) == 8


def test_flops_are_of_both_sides():
    objective, cfg = made()
    specs = {"input_ids": Spec((L,)), "decoder_input_ids": Spec((T,))}
    head = 6 * V * 16 * T / L
    both = encoder_flops(cfg, L, 0) + decoder_flops(cfg, T, L) * T / L
    assert objective.flops(specs) == pytest.approx(both + head)


def test_what_the_host_has_to_make():
    assert made()[0].needs == {"noise"}
    assert made(":target=spans,density=0.5")[0].needs == {"spans:density=0.5,mean=3"}
    assert made(":target=my_lab.half:a=2")[0].needs == {"my_lab.half:a=2"}
    assert not made()[1].pooler


@pytest.mark.parametrize(
    "options, changes, said",
    [
        ("", {"num_decoder_layers": 0}, "needs a decoder"),
        (":target=span", {}, "target='span' is unknown; did you mean 'spans'"),
        (":density=0.3", {}, r"density=0\.3 needs target=spans"),
        (":z_loss=-1", {}, "z_loss=-1"),
        ("+mlm", {}, "stands alone"),
        (":rate=1", {}, "option of bertjax.objectives.denoise='rate' is unknown"),
    ],
)
def test_refusals(options, changes, said):
    with pytest.raises(UserError, match=said):
        made(options, dataclasses.replace(CFG, **changes))
