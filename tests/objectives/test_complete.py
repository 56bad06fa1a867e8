# SPDX-License-Identifier: Apache-2.0
"""CoKE's loss and answers: the published formula, packed rows, training on a graph."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import train_steps

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.models import encoder
from bertjax.models.config import EncoderConfig
from bertjax.objectives import token_head
from bertjax.objectives.complete import (
    entity_scores,
    likeliest_of,
    read_product,
    soft_cross_entropy,
)
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel.mesh import make_mesh
from bertjax.tasks.graphs import Graph
from bertjax.tasks.task_rows import Form
from bertjax.tasks.triple_files import parse_triples
from bertjax.tasks.types.complete import TASK_TYPE, Candidates, make_tokenizer


def make_cfg(vocab_size, **changes):
    return EncoderConfig(
        **dict(
            vocab_size=vocab_size,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=8,
            type_vocab_size=0,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        | changes
    )


def make_rows(text, paths=1, answers=1):
    read = parse_triples(text, "t.tsv")
    made = Graph.of(read, [], {}, False)
    settings = {"paths": paths, "answers": answers}
    graph = Graph(made.entities, made.relations, settings=settings)
    tokenizer = make_tokenizer(graph)
    form = Form((), "", (), 1, TASK_TYPE.metrics, graph=graph)
    return TASK_TYPE.make_rows(read, form, tokenizer, True), tokenizer


def gathered(rows, tokenizer, example=None, epoch=0):
    example = np.arange(rows.n) if example is None else example
    return rows.gather(example, counter_rng.fold(1, epoch, example), tokenizer)


RING = "".join(f"e{i}\tnext\te{(i + 1) % 9}\n" for i in range(9))
RING += "".join(f"e{i}\tsecond\te{(i + 2) % 9}\n" for i in range(9))


@pytest.mark.parametrize("gold", [1.0, 0.9, 0.15])
def test_the_loss_is_the_published_formula(gold):
    """PaddlePaddle/Research, KG/CoKE: the cross-entropy of soft labels over the
    entities, computed here in float64."""
    draw = np.random.default_rng(0)
    scores = draw.normal(size=(2, 3, 7))
    right, weights = draw.integers(0, 7, (2, 3)), np.array([[1, 1, 0], [1, 0.5, 1]])
    one_hot = np.eye(7)[right]
    soft = one_hot * gold + (1 - one_hot) * (1 - gold) / (7 - 1)
    log_p = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    each = -(soft * log_p).sum(-1)
    places = right[..., None]
    f32 = (jnp.asarray(scores, jnp.float32), places, jnp.asarray(weights, jnp.float32))
    found = soft_cross_entropy(*f32, gold)
    assert found.value == pytest.approx((weights * each).sum(), rel=1e-5)
    assert found.weight == weights.sum()


def test_a_worked_loss():
    scores = jnp.log(jnp.array([[0.5, 0.25, 0.25]]))
    right, ones = jnp.array([[0]]), jnp.ones(1)
    assert soft_cross_entropy(scores, right, ones, 1.0).value == pytest.approx(
        np.log(2)
    )
    # 0.6 ln 2 + 2 * 0.2 ln 4
    half = soft_cross_entropy(scores, right, ones, 0.6).value
    assert half == pytest.approx(0.6 * np.log(2) + 0.4 * np.log(4))
    # The target is the mean of 0.6 0.2 0.2 and 0.2 0.6 0.2. For the accuracy, the
    # likelier one counts.
    both = jnp.array([[1, 0, -1]])
    found = soft_cross_entropy(scores, both, ones, 0.6).value
    assert found == pytest.approx(0.4 * np.log(2) + 0.6 * np.log(4))
    assert likeliest_of(scores, both).tolist() == [0]


def test_entities_alone_are_candidates():
    """Logits of relations and special tokens, however large, change nothing."""
    cfg = make_cfg(5 + 4 + 2)
    objective, cfg = make_objective("complete", cfg, candidates=Candidates(5, 4))
    params = objective.init(jax.random.key(0))
    hidden = jax.random.normal(jax.random.key(1), (1, 2, 32))
    before = entity_scores(params, cfg, hidden, 5, 4)
    assert before.shape == (1, 2, 4)
    others = jnp.r_[0:5, 9:11]
    params["mlm"]["bias"] = params["mlm"]["bias"].at[others].set(100.0)
    word = params["encoder"]["embeddings"]["word"]
    params["encoder"]["embeddings"]["word"] = word.at[others].set(3.0)
    np.testing.assert_array_equal(entity_scores(params, cfg, hidden, 5, 4), before)


def test_scores_are_of_a_product_with_what_is_given():
    """Compute by hand: the hidden state times the embedding of the given entity,
    normalized, times the embeddings of the entities, without a transform. The loss of a
    batch is that of these scores."""
    cfg = make_cfg(5 + 4 + 2)
    spec = "complete:product=True,gold=1"
    objective, cfg = make_objective(spec, cfg, candidates=Candidates(5, 4))
    params = objective.init(jax.random.key(0))
    assert set(params["mlm"]) == {"norm", "bias"}
    draw = np.random.default_rng(0)
    word = draw.normal(size=(11, 32)).astype(np.float32)
    bias = draw.normal(size=11).astype(np.float32)
    scale, shift = draw.normal(size=(2, 32)).astype(np.float32)
    params["encoder"]["embeddings"]["word"] = jnp.asarray(word)
    params["mlm"] = {"norm": {"scale": scale, "bias": shift}, "bias": bias}
    batch = {
        "input_ids": np.array([[4, 9, 5], [7, 10, 4]], np.int32),
        "attention_mask": np.ones((2, 3), np.int32),
        "complete_positions": np.array([[0], [2]], np.int32),
        "complete_given": np.array([[5], [7]], np.int32),
        "complete_ids": np.array([[6], [8]], np.int32),
        "complete_weights": np.ones((2, 1), np.float32),
    }
    at = batch["complete_positions"]
    encoded = encoder.apply(params["encoder"], cfg, batch, at=at)
    found = read_product(params, cfg, encoded, batch, None)
    x = np.asarray(encoded.hidden)[:, 0] * word[[5, 7]]
    x = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True) * scale + shift
    np.testing.assert_allclose(found[:, 0], x, rtol=1e-3, atol=1e-4)
    wanted = x @ word[5:9].T + bias[5:9]
    scores = entity_scores(params, cfg, found, 5, 4)
    np.testing.assert_allclose(scores[:, 0], wanted, rtol=1e-3, atol=1e-3)
    log_p = np.asarray(jax.nn.log_softmax(wanted))
    loss = objective.sums(params, batch, None)["complete_loss"].value
    assert float(loss) == pytest.approx(-float(log_p[0, 1] + log_p[1, 3]), rel=1e-3)


def test_a_product_of_other_widths_is_refused():
    cfg = make_cfg(20, embedding_size=16)
    objective, _ = make_objective("complete:product=True", cfg)
    with pytest.raises(UserError, match="product"):
        objective.init(jax.random.key(0))


def test_a_product_learns_what_a_sum_has_not():
    """Train two relations on a ring of nine for so few updates that the published head
    still guesses."""
    found = {}
    for product in (False, True):
        objective, batches, rows, tokenizer = ring_batches(15, f"product={product}")
        one = make_mesh(devices=jax.devices()[:1])
        _, params = train_steps(objective, one, batches)
        scored = rows.for_scores().plan(12)
        _, outputs = jax.jit(objective.evaluate)(params, gathered(scored, tokenizer))
        found[product] = scored.score(outputs, np.arange(scored.n))["mrr"]
    guessing = np.mean(1 / np.arange(1, 10))  # a query has one answer of nine
    assert found[False] < guessing + 0.1 < found[True] - 0.1


@pytest.mark.parametrize("gold", [0, 1.5])
def test_a_share_that_is_none_is_refused(gold):
    with pytest.raises(UserError, match="gold="):
        make_objective(f"complete:gold={gold}", make_cfg(20))


@pytest.mark.parametrize("name", ["complete", "edges", "mlmlm"])
def test_answers_of_no_candidates_are_refused(name):
    with pytest.raises(UserError, match=f"{name}'s top=0 "):
        make_objective(f"{name}:top=0", make_cfg(20))


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("product", [False, True])
def test_packed_is_unpacked(product, pieces, monkeypatch):
    """Packed rows of 64 tokens have the losses and ranks of separate triples and paths,
    also if logits are computed in pieces."""
    rows, tokenizer = make_rows(RING, paths=3)
    cfg = make_cfg(tokenizer.vocab_size, initializer_range=0.3)
    spec = f"complete:gold=0.7,product={product}"
    objective, _ = make_objective(spec, cfg, candidates=rows.candidates)
    params = jax.jit(objective.init)(jax.random.key(0))
    rows = rows.plan(64)
    packed = gathered(rows, tokenizer)
    alone = single_rows(packed, tokenizer)
    two, theirs = jax.jit(objective.evaluate)(params, alone)
    monkeypatch.setattr(token_head, "count_chunks", lambda *_: pieces)
    one, own = jax.jit(lambda *args: objective.evaluate(*args))(params, packed)
    for term in ("complete_loss", "complete_accuracy"):
        for a, b in zip(one[term], two[term], strict=True):
            assert float(a) == pytest.approx(float(b), rel=1e-5)
    real = rows.members(np.arange(rows.n)) >= 0
    for name in ("greater", "equal"):
        mine = np.asarray(own[name])[real]
        np.testing.assert_array_equal(mine, np.asarray(theirs[name])[:, 0])


@pytest.mark.parametrize("gold", [1.0, 0.9])
def test_answers_at_once_have_the_loss_of_one_by_one(gold):
    """A query has the weight of all its triples, for any `gold`."""
    lines = {f"e{i}\tr\te{j}\n" for i in range(5) for j in range(i + 2)}
    found, sizes = [], []
    for answers in (1, 2, 8):
        rows, tokenizer = make_rows("".join(sorted(lines)), answers=answers)
        rows = rows.plan(24)
        cfg = make_cfg(tokenizer.vocab_size, initializer_range=0.3)
        spec = f"complete:gold={gold}"
        objective, _ = make_objective(spec, cfg, candidates=rows.candidates)
        params = jax.jit(objective.init)(jax.random.key(0))
        terms, _ = jax.jit(objective.evaluate)(params, gathered(rows, tokenizer))
        found.append(terms["complete_loss"])
        sizes.append(len(rows.laid.sides))
    (one, weight), *others = found
    for many, same in others:
        assert weight == same == 2 * len(lines)
        assert float(many) == pytest.approx(float(one), rel=1e-5)
    assert sizes[2] < sizes[1] < sizes[0]


def single_rows(batch, tokenizer):
    """Put each sequence of a batch into its own row, without packing."""
    ids, positions, given, right = [], [], [], []
    for row, segments in enumerate(batch["segment_ids"]):
        for slot in range(segments.max()):
            mine = np.flatnonzero(segments == slot + 1)
            line = np.full(5, tokenizer.pad_id, np.int32)
            line[: len(mine)] = batch["input_ids"][row, mine]
            ids.append(line)
            positions.append([batch["complete_positions"][row, slot] - mine[0]])
            # The given end of a triple or path, which is not masked.
            masked = positions[-1][0] == 0
            given.append([batch["input_ids"][row, mine[-1 if masked else 0]]])
            right.append([batch["complete_ids"][row, slot]])
    ids = np.stack(ids)
    return {
        "input_ids": ids,
        "attention_mask": (ids != tokenizer.pad_id).astype(np.int32),
        "complete_positions": np.array(positions, np.int32),
        "complete_given": np.array(given, np.int32),
        "complete_ids": np.array(right, np.int32),
        "complete_weights": np.ones((len(ids), 1), np.float32),
    }


def ring_batches(steps, options="gold=1"):
    rows, tokenizer = make_rows(RING)
    cfg = make_cfg(tokenizer.vocab_size)
    spec = f"complete:{options}"
    objective, _ = make_objective(spec, cfg, candidates=rows.candidates)
    laid = rows.plan(12)
    some = [np.arange(8) + i % 2 * (laid.n - 8) for i in range(steps)]
    batches = [gathered(laid, tokenizer, e, i) for i, e in enumerate(some)]
    return objective, batches, rows, tokenizer


def test_eight_devices_are_one():
    objective, batches, *_ = ring_batches(3)
    one = make_mesh(devices=jax.devices()[:1])
    few, many = (train_steps(objective, m, batches)[0] for m in (one, make_mesh()))
    for a, b in zip(few, many, strict=True):
        for name in ("train/loss", "train/complete_accuracy", "optim/grad_norm"):
            assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-4), name


def test_a_ring_is_solved():
    """On a ring of nine every query has one answer; after training the MRR is 1."""
    objective, batches, rows, tokenizer = ring_batches(250)
    one = make_mesh(devices=jax.devices()[:1])
    _, params = train_steps(objective, one, batches)
    scored = rows.for_scores().plan(12)
    evaluate = jax.jit(objective.evaluate)
    _, outputs = evaluate(params, gathered(scored, tokenizer))
    every = np.arange(scored.n)
    metrics = scored.score(outputs, every)
    assert metrics["mrr"] == metrics["hits@1"] == metrics["mrr_pessimistic"] == 1.0
    sides = scored.parts(outputs, every)["sides"]
    assert sides["head"]["mrr"] == sides["tail"]["mrr"] == 1.0
