# SPDX-License-Identifier: Apache-2.0
"""Masked edges: attention along edges, and relations that follow from the graph."""

import dataclasses
import operator

import jax
import numpy as np
import pytest
from conftest import tiny_encoder, train_steps
from subgraphs import gathered, make_rows, random_lines

from bertjax import UserError
from bertjax.models import encoder
from bertjax.models.attention import choose_backend
from bertjax.models.attention_mask import MaskKind, make_attention_mask
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel.mesh import make_mesh


def make_model(rows, tokenizer, layers=2):
    cfg = tiny_encoder(
        tokenizer.vocab_size,
        64,
        num_hidden_layers=layers,
        type_vocab_size=3,
        position_embedding_type="none",
        initializer_range=0.3,
    )
    objective, cfg = make_objective("edges", cfg, candidates=rows.candidates)
    return objective, cfg


def test_the_mask_is_the_edges():
    rows, tokenizer = make_rows(random_lines())
    batch = gathered(rows.plan(32), tokenizer)
    mask = make_attention_mask(batch)
    wanted = batch["attention_edges"] * batch["attention_mask"][:, None]
    np.testing.assert_array_equal(mask.boolean[:, 0], wanted > 0)
    assert mask.boolean.any(-1).all()  # padding has a visible key, too
    at = np.tile([[1, 5]], (rows.n, 1))
    some = mask._replace(query_positions=at).boolean[:, 0]
    np.testing.assert_array_equal(some, wanted[:, [1, 5]] > 0)
    for name in ("fused", "splash", "cudnn"):
        with pytest.raises(UserError, match="attention_edges"):
            choose_backend(name, (1, 128, 2, 64), 0.0, kind=MaskKind(edges=True))
    with pytest.raises(ValueError, match="attention_edges has shape"):
        make_attention_mask(batch | {"attention_edges": batch["attention_mask"]})


def test_what_is_not_joined_is_not_seen():
    """After one layer the masked edge's first token depends only on the head, the other
    masked token and [CLS]; after two layers on all tokens."""
    rows, tokenizer = make_rows(random_lines())
    batch = gathered(rows.plan(64), tokenizer)
    _, cfg = make_model(rows, tokenizer)
    params = encoder.init(jax.random.key(0), cfg)
    changed = dict(batch, input_ids=batch["input_ids"].copy())
    last = batch["attention_mask"].sum(1) - 1  # a token of some other edge
    changed["input_ids"][np.arange(rows.n), last] = tokenizer.unk_id
    run = jax.jit(encoder.apply, static_argnums=1)
    for layers in (1, 2):
        own = dataclasses.replace(cfg, num_hidden_layers=layers)
        first = jax.tree.map(operator.itemgetter(slice(layers)), params["layers"])
        part = params | {"layers": first}
        one, other = (run(part, own, b).hidden[:, 1] for b in (batch, changed))
        same = np.abs(one - other).max(-1) < 1e-6
        assert same.all() if layers == 1 else not same.any()


def test_the_order_of_tokens_says_nothing():
    rows, tokenizer = make_rows(random_lines())
    objective, _ = make_model(rows, tokenizer)
    params = jax.jit(objective.init)(jax.random.key(0))
    scored = rows.for_scores().plan(48)
    batch = gathered(scored, tokenizer)
    order = np.concatenate([[0], 1 + np.random.default_rng(0).permutation(47)])
    moved = {
        name: values[:, order] if values.shape[1:2] == (48,) else values
        for name, values in batch.items()
    }
    moved["attention_edges"] = batch["attention_edges"][:, order][:, :, order]
    place = np.flatnonzero(order == 1)
    moved["edges_positions"] = np.tile(place, (rows.n, 1)).astype(np.int32)
    run = jax.jit(objective.evaluate)
    (one, _), (other, _) = run(params, batch), run(params, moved)
    a, b = (float(sums["edges_loss"].value) for sums in (one, other))
    assert a == pytest.approx(b, rel=1e-5)


def test_relations_that_the_graph_tells_are_learnt():
    """Edges go up or down between levels: held-out edges have the relation that the
    edges around their ends imply."""
    draw = np.random.default_rng(0)
    pairs = {
        (int(a), int(b)) for a, b in draw.integers(0, 14, (90, 2)) if a % 7 != b % 7
    }
    lines = [f"e{a}\t{'up' if a % 7 < b % 7 else 'down'}\te{b}\n" for a, b in pairs]
    rows, tokenizer = make_rows("".join(lines[:-12]), "".join(lines))
    objective, _ = make_model(rows, tokenizer)
    train, _ = make_rows("".join(lines[:-12]))
    laid, n = train.plan(23), 24
    batches = []
    for i in range(150):
        example = np.arange(i * n, (i + 1) * n) % laid.n
        keys = np.arange(n, dtype=np.uint64) + 1000 * i
        batches.append(laid.gather(example, keys, tokenizer))
    one = make_mesh(devices=jax.devices()[:1])
    _, params = train_steps(objective, one, batches)
    scored = rows.for_scores().plan(23)
    outputs = jax.jit(objective.evaluate)(params, gathered(scored, tokenizer))[1]
    held_out = {k: np.asarray(v)[-12:] for k, v in outputs.items()}
    found = scored.score(held_out, np.arange(scored.n - 12, scored.n))
    assert found["hits@1"] > 0.8 and found["mrr"] > 0.9
