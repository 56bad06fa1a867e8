# SPDX-License-Identifier: Apache-2.0
"""Masked diffusion: published losses, likelihoods by enumeration, and no leaks."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_encoder
from host_half import make_half
from made_up import fake_tokenizer

from bertjax.data import counter_rng
from bertjax.data.features.base import GatheredRows
from bertjax.models import encoder
from bertjax.objectives.base import TokenIds
from bertjax.objectives.diffusion import make_head
from bertjax.objectives.make_objective import make_objective
from bertjax.objectives.token_head import score_tokens

V, CLS, SEP, MASK = 9, 2, 3, 4
# A large initializer_range, so that predictions are far from uniform.
CFG = tiny_encoder(V, 16, num_hidden_layers=3, initializer_range=0.6, pooler=False)
TOKENIZER = fake_tokenizer(V)


def make(options="", length=8, **keys):
    """Return the objective, the features and the sums of `diffusion:options`."""
    name = f"diffusion:{options}"
    cfg = dataclasses.replace(CFG, **keys)
    objective, cfg = make_objective(name, cfg, TokenIds.of(TOKENIZER))
    half = make_half(objective.needs, TOKENIZER, length)

    @jax.jit
    def sums(params, batch):
        return objective.sums(params, batch, None)

    return SimpleNamespace(objective=objective, half=half, sums=sums, cfg=cfg)


@pytest.fixture(scope="module")
def params():
    return jax.jit(make().objective.init)(jax.random.key(1))


def gather(texts, place=0, **more):
    """Return rows of whole texts, like those that a plan gathers."""
    ids = np.array(texts, np.int32)
    arrays = {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int32)}
    arrays["token_type_ids"] = np.zeros_like(ids)
    place = place + np.arange(len(ids))
    keys = counter_rng.fold(3, place)
    return GatheredRows(arrays | more, keys, place, place)


def random_texts(b, n, seed=0):
    ids = np.random.default_rng(seed).integers(5, V, (b, n))
    ids[:, 0], ids[:, -1] = CLS, SEP
    return ids


def log_probs(params, cfg, batch):
    """Return the model's log probabilities at every position, f64 [B, L, V]."""
    encoded = encoder.apply(params["encoder"], cfg, batch)
    ids = jnp.zeros(encoded.hidden.shape[:2], jnp.int32)
    how = ids, jnp.zeros(ids.shape), "own", 0.0, MASK
    logits = score_tokens(params, cfg, encoded.hidden, *how)[1]
    return np.asarray(jax.nn.log_softmax(logits), np.float64)


# ---------------------------------------------------------------- published losses
def loss_of_logits(weights_of):
    """Return the loss of made-up logits, masks and times, computed by the head."""
    rows, length, vocab = 3, 6, 8
    i = np.arange(rows * length * vocab).reshape(rows, length, vocab)
    logits = 3 * np.sin(i * 0.7) + np.cos(i * i * 0.01)
    at = np.arange(rows * length).reshape(rows, length)
    masked = np.sin(at * 1.3) > -0.2
    batch = {
        "diffusion_ids": (5 + at * 7 % 3).astype(np.int32),
        "diffusion_weights": (masked * weights_of[:, None]).astype(np.float32),
        "diffusion_norm": np.full(rows, length, np.float32),
    }
    keys = dict(hidden_size=vocab, vocab_size=vocab, num_attention_heads=1)
    cfg = dataclasses.replace(CFG, **keys, classifier_transform=False)
    head = make_head(TokenIds(mask_id=MASK))
    params = {"encoder": {"embeddings": {"word": jnp.eye(vocab)}}}
    params["mlm"] = {"bias": jnp.zeros(vocab)}
    encoded = encoder.Encoded(jnp.asarray(logits, jnp.float32), None)
    sums = head.sums(params, cfg, encoded, batch, None)
    value = sums["diffusion_loss"].value / head.weights(batch)["diffusion_loss"]
    return float(value)


@pytest.mark.parametrize(
    ("weights", "rates", "loss"),
    [
        # Computed by kuleshov-group/mdlm, diffusion.py, LogLinearNoise, at t = 0.1,
        # 0.45, 0.9.
        ("mdlm", [0.0999, 0.44955, 0.8991], 11.649921466777597),
        # LLaDA's loss (GUIDELINES.md) at the same t; the softmax leaves [MASK] out.
        ("llada", [0.1009, 0.45055, 0.9001], 11.576372281703275),
    ],
)
def test_the_published_losses(weights, rates, loss):
    """The same logits, masks and rates give the published losses, in nats per token."""
    half = make(f"weights={weights}").half
    rate = np.array(rates)
    found = loss_of_logits(half.weigh(rate, np.full(3, 1 - half.eps)))
    assert found == pytest.approx(loss, rel=1e-6)


# ---------------------------------------------------------------- by enumeration
N = 3  # tokens of text; V - 1 pieces are predicted, [MASK] is not


@pytest.fixture(scope="module")
def table(params):
    """Return log p of each piece at each position, for each input: f64 [V, V, V, N, V].

    Tokens that are not visible are MASK in the input.
    """
    made = make(length=N + 2)
    seen = np.array([*itertools.product(range(V), repeat=N)])
    ids = np.pad(seen, ((0, 0), (1, 1)), constant_values=((0, 0), (CLS, SEP)))
    batch = gather(ids).arrays | {"attention_mask": np.ones(ids.shape, np.int32)}
    found = jax.jit(lambda p: encoder.apply(p["encoder"], made.cfg, batch).hidden)
    hidden = found(params)
    how = np.zeros(ids.shape, np.int32), np.zeros(ids.shape), "own", 0.0, MASK
    logits = score_tokens(params, made.cfg, hidden, *how)[1]
    logp = np.asarray(jax.nn.log_softmax(logits), np.float64)[:, 1:-1]
    return logp.reshape(V, V, V, N, V)


def masked_loss(table, text, masks):
    """Return -log p of the masked tokens of a text, given the others."""
    seen = tuple(np.where(masks, MASK, text))
    return -sum(table[seen][i, text[i]] for i in np.flatnonzero(masks))


def orders(table, text):
    """Return -log p of a text for each order of predicting its tokens."""
    losses = []
    for order in itertools.permutations(range(N)):
        masks, loss = np.ones(N, bool), 0.0
        for i in order:
            seen = tuple(np.where(masks, MASK, text))
            loss -= table[seen][i, text[i]]
            masks[i] = False
        losses.append(loss)
    return np.array(losses)


MASKS = [np.array(m, bool) for m in itertools.product([0, 1], repeat=N)]
TEXTS = [(5, 6, 7), (8, 8, 8), (7, 5, 5), (6, 8, 5)]


def test_the_mean_of_orders_is_a_law(table):
    """Drawing an order and then the tokens is a distribution: p sums to 1. The loss is
    a bound of its -log p."""
    pieces = [v for v in range(V) if v != MASK]
    total = sum(
        np.exp(-orders(table, text)).mean()
        for text in itertools.product(pieces, repeat=N)
    )
    assert total == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_expected_loss_is_the_mean_over_orders_and_a_bound(table, schedule):
    """Take rates and weights from the features, and enumerate the masks. With any
    schedule the expected loss is -log p averaged over orders, which is at least -log of
    the average p."""
    half = make(f"schedule={schedule},eps=1e-6").half
    rate, weight = (x[:, 0] for x in half.rates(np.arange(2**15), 1))
    for text in TEXTS:
        loss = sum(
            np.mean(weight * rate ** m.sum() * (1 - rate) ** (~m).sum())
            * masked_loss(table, text, m)
            for m in MASKS
        )
        each = orders(table, text)
        assert loss == pytest.approx(each.mean(), rel=2e-3)
        exact = -np.log(np.exp(-each).mean())
        assert loss > exact + 0.01 and each.std() > 0.05  # orders have different p


def losses_in_steps(table, text, steps):
    """Return -log p of a text for each assignment of its tokens to steps.

    The tokens of a step are predicted at once, from those of the steps before.
    """
    losses = []
    for step in itertools.product(range(steps), repeat=N):
        step, loss = np.array(step), 0.0
        for s in range(steps):
            seen = tuple(np.where(step >= s, MASK, text))
            loss -= sum(table[seen][i, text[i]] for i in np.flatnonzero(step == s))
        losses.append(loss)
    return np.array(losses)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_discrete_bound(table, steps):
    """With T steps a mask at step s has weight 1 / s (MDLM, section 3). The loss is the
    mean over all ways to reveal the text in T steps, and a bound of their -log p."""
    t = np.arange(1, steps + 1) / steps
    for text in TEXTS:
        bound = sum(
            np.sum(t ** m.sum() * (1 - t) ** (~m).sum() / (t * steps))
            * masked_loss(table, text, m)
            for m in MASKS
        )
        each = losses_in_steps(table, text, steps)
        assert bound == pytest.approx(each.mean(), rel=1e-9)
        assert bound >= -np.log(np.exp(-each).mean()) - 1e-12


def test_a_step_s_loss_is_what_enumeration_says(table, params):
    """Compute the loss of a batch from the features, with different masks per row."""
    made = make("schedule=cosine", length=N + 2)
    texts = np.array([(CLS, *TEXTS[i % 4], SEP) for i in range(64)])
    batch = made.half.make(gather(texts, place=500))
    weights = batch["diffusion_weights"][:, 1:-1].astype(np.float64)
    expected = sum(
        w.max() * masked_loss(table, text[1:-1], w > 0)
        for text, w in zip(texts, weights, strict=True)
    )
    sums = made.sums(params, batch)
    assert float(sums["diffusion_loss"].value) == pytest.approx(expected, rel=1e-5)
    assert float(made.objective.weights(batch)["diffusion_loss"]) == 64 * N
    assert float(sums["diffusion_accuracy"].weight) == (weights > 0).sum()


# ---------------------------------------------------------------- blocks
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_one_block_is_plain_diffusion(params, schedule):
    texts = random_texts(16, 8)
    texts[3, 4:], texts[3, 3] = 0, SEP
    rows = gather(texts, place=40)
    plain = make(f"schedule={schedule}")
    block = make(f"schedule={schedule},block=8", 16)
    batches = plain.half.make(rows), block.half.make(rows)
    losses = [
        float(made.sums(params, batch)["diffusion_loss"].value)
        for made, batch in zip((plain, block), batches, strict=True)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] > 10


@pytest.mark.parametrize("options", ["low=1", "low=0.2,high=0.9"])
def test_blocks_of_one_token_are_a_causal_model(params, options):
    """At any rate, a masked token is predicted from the clean tokens before it, as by a
    decoder that reads them and then [MASK]. At rate 1 the loss is -log p."""
    made = make(f"block=1,weights=llada,{options}", 16)
    texts = random_texts(4, 8)
    batch = made.half.make(gather(texts))
    decoder = dataclasses.replace(CFG, is_decoder=True)
    # Row i of a text has the tokens before i, then [MASK]; position i does not see the
    # rest.
    ids = np.where(np.tri(8, k=-1, dtype=bool), texts[:, None], MASK).reshape(-1, 8)
    real = np.ones(ids.shape, np.int32)
    each = {"input_ids": ids, "attention_mask": real, "token_type_ids": 0 * real}
    logp = log_probs(params, decoder, each).reshape(4, 8, 8, V)
    at = np.arange(8)
    causal = np.take_along_axis(logp[:, at, at], texts[..., None], -1)[..., 0]
    weights = batch["diffusion_weights"]
    expected = -(causal * weights).sum()
    found = float(made.sums(params, batch)["diffusion_loss"].value)
    assert found == pytest.approx(expected, rel=1e-5)
    if options == "low=1":
        assert weights.tolist() == [[0, 1, 1, 1, 1, 1, 1, 0]] * 4


@pytest.mark.parametrize("packed", [False, True])
def test_blocks_leak_nothing(params, packed):
    """With three layers, a clean token affects clean blocks from its own on and later
    masked blocks; a token of a masked block affects only that block."""
    n, size = 12, 3
    text = random_texts(2, n)
    more = {}
    if packed:
        text[:, 5:7] = SEP, CLS
        sequence = np.repeat([[1, 2]], 6, axis=1).repeat(2, axis=0).astype(np.int32)
        more["segment_ids"] = sequence
        more["position_ids"] = np.tile(np.arange(6, dtype=np.int32), (2, 2))
    made = make(f"block={size}", 2 * n)
    batch = made.half.make(gather(text, **more))

    @jax.jit
    def hidden(ids):
        given = batch | {"input_ids": ids}
        return encoder.apply(params["encoder"], made.cfg, given).hidden

    before = hidden(batch["input_ids"])
    whole = np.tile(np.arange(n), 2)
    number = whole // 6 if packed else 0 * whole
    block = (whole % 6 if packed else whole) // size
    is_clean = np.arange(2 * n) >= n
    for column in (1, 4, 7, 10, n + 1, n + 4, n + 7, n + 10):
        ids = batch["input_ids"].copy()
        ids[:, column] = np.where(ids[:, column] == 6, 5, 6)
        reached = np.asarray(before != hidden(ids)).any(-1)
        own = block[column]
        if column < n:
            expected = ~is_clean & (block == own)
        else:
            expected = (is_clean & (block >= own)) | (~is_clean & (block > own))
        expected &= number == number[column]
        np.testing.assert_array_equal(reached, np.tile(expected, (2, 1)))


def test_packed_sequences_lose_as_alone(params):
    """A packed row has the loss of its separate sequences with the same masks and
    weights."""
    n, made = 12, make("block=2", 24)
    text = random_texts(3, n, seed=4)
    text[:, 5:7] = SEP, CLS
    sequence = np.repeat([[1, 2]], 6, axis=1).repeat(3, axis=0).astype(np.int32)
    position = np.tile(np.arange(6, dtype=np.int32), (3, 2))
    batch = made.half.make(gather(text, segment_ids=sequence, position_ids=position))
    whole = float(made.sums(params, batch)["diffusion_loss"].value)
    parts = 0.0
    for first in (0, 6):
        own = np.r_[first : first + 6, n + first : n + first + 6]
        alone = {name: x[:, own] for name, x in batch.items() if x.shape[1:] == (24,)}
        alone["segment_ids"] = np.ones_like(alone["segment_ids"])
        for name in ("diffusion_ids", "diffusion_weights"):
            alone[name] = batch[name][:, first : first + 6]
        alone["diffusion_positions"] = np.tile(np.arange(6, dtype=np.int32), (3, 1))
        alone["diffusion_norm"] = batch["diffusion_norm"]
        parts += float(made.sums(params, alone)["diffusion_loss"].value)
    assert whole == pytest.approx(parts, rel=1e-6)


@pytest.mark.parametrize("options", ["", "block=4,low=0.3,high=0.8"])
def test_bfloat16_is_near_float32(params, options):
    losses = []
    batch = make(options, 16 if options else 8).half.make(gather(random_texts(64, 8)))
    for dtype in ("float32", "bfloat16"):
        objective = make(options, 16 if options else 8, dtype=dtype).objective
        norm = float(objective.weights(batch)["diffusion_loss"])

        def loss(p, objective=objective):
            return objective.sums(p, batch, None)["diffusion_loss"].value

        value, grads = jax.jit(jax.value_and_grad(loss))(params)
        assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads))
        losses.append(float(value) / norm)
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    assert 0.5 * math.log(V) < losses[0] < 5 * math.log(V)
