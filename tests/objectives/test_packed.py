# SPDX-License-Identifier: Apache-2.0
"""Packed sequences have the states, losses and gradients of separate ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.models.config import EncoderConfig
from bertjax.objectives.make_objective import make_objective

V, L, S = 60, 24, 4
CFG = EncoderConfig(
    vocab_size=V,
    hidden_size=32,
    num_hidden_layers=3,
    unroll=1,  # compiles one layer's body, which is quick
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=L,
)
PACKED = ([9, 5, 8], [24], [3, 4, 6, 7])  # lengths of the sequences in each row


def sequences():
    """Make sequences (ids, types, predicted positions, their originals), and labels."""
    draw = np.random.default_rng(0)
    out = []
    for n in (n for row in PACKED for n in row):
        at = np.sort(draw.choice(n, draw.integers(0, 3), replace=False))
        types = np.arange(n) >= draw.integers(1, n)
        out.append((draw.integers(0, V, n), types, at, draw.integers(0, V, len(at))))
    return out, draw.integers(0, 2, len(out))


def lay_out(rows, labels, name):
    """Make the batch of rows, each of which is a list of sequences."""
    b = len(rows)
    names = ("input_ids", "attention_mask", "token_type_ids", "segment_ids")
    batch = {k: np.zeros((b, L), np.int32) for k in (*names, "position_ids")}
    batch |= {k: np.zeros((b, 8), np.int32) for k in ("mlm_positions", "mlm_ids")}
    batch["mlm_weights"] = np.zeros((b, 8), np.float32)
    batch |= {k: np.zeros((b, S), np.int32) for k in ("cls_positions", name)}
    batch["cls_weights"] = np.zeros((b, S), np.float32)
    number = 0
    for r, row in enumerate(rows):
        start = slot = 0
        for s, (ids, types, at, true) in enumerate(row):
            part = np.s_[r, start : start + len(ids)]
            batch["input_ids"][part] = ids
            batch["attention_mask"][part] = 1
            batch["token_type_ids"][part] = types
            batch["segment_ids"][part] = s + 1
            batch["position_ids"][part] = np.arange(len(ids))
            batch["cls_positions"][r, s] = start
            batch["cls_weights"][r, s] = 1
            batch[name][r, s] = labels[number]
            for p, i in zip(at, true, strict=True):
                batch["mlm_positions"][r, slot] = start + p
                batch["mlm_ids"][r, slot] = i
                batch["mlm_weights"][r, slot] = 1
                slot += 1
            start += len(ids)
            number += 1
    return batch


def both(name):
    found, labels = sequences()
    iterator = iter(found)
    packed = [[next(iterator) for _ in row] for row in PACKED]
    return lay_out(packed, labels, name), lay_out([[s] for s in found], labels, name)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["nsp", "sop"])
def test_losses_and_gradients_do_not_depend_on_packing(task):
    objective, _ = make_objective(f"mlm+{task}", CFG)
    params = jax.jit(objective.init)(jax.random.key(1))
    params = jax.tree.map(lambda x: x * 5 if x.ndim > 2 else x, params)

    def means(params, batch):
        sums = objective.sums(params, batch, None)
        return {term: s.value / s.weight for term, s in sums.items()}

    def loss(params, batch):
        return sum(v for k, v in means(params, batch).items() if k.endswith("loss"))

    means, grad = jax.jit(means), jax.jit(jax.grad(loss))
    packed, alone = both(f"{task}_labels")
    a, b = means(params, packed), means(params, alone)
    assert set(a) == {f"{t}_{m}" for t in ("mlm", task) for m in ("loss", "accuracy")}
    for term in a:
        np.testing.assert_allclose(a[term], b[term], atol=1e-5)
    g, h = grad(params, packed), grad(params, alone)
    for x, y in zip(jax.tree.leaves(g), jax.tree.leaves(h), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    # Rows with one sequence are the same as rows without segment_ids.
    plain = {k: v for k, v in alone.items() if k[:3] not in ("seg", "cls", "pos")}
    plain[f"{task}_labels"] = alone[f"{task}_labels"][:, 0]
    c = means(params, plain)
    for term in b:
        np.testing.assert_allclose(c[term], b[term], atol=1e-5)


def test_no_token_sees_another_sequence():
    from bertjax.models import encoder

    packed, _ = both("nsp_labels")
    params = encoder.init(jax.random.key(0), CFG)
    params = jax.tree.map(lambda x: x * 5 if x.ndim > 2 else x, params)
    apply = jax.jit(lambda p, b: encoder.apply(p, CFG, b))
    before = apply(params, packed)
    changed = dict(packed, input_ids=packed["input_ids"].copy())
    mine = packed["segment_ids"] == 2
    changed["input_ids"][mine] = (changed["input_ids"][mine] + 7) % V
    after = apply(params, changed)
    moved = np.abs(after.hidden - before.hidden).max(axis=-1)
    assert (moved[mine] > 1e-3).all()
    assert (moved[~mine] == 0).all()
    pooled = np.abs(after.pooled - before.pooled).max(axis=-1)
    real = packed["cls_weights"] > 0
    second = real & (np.arange(S) == 1)
    assert (pooled[second] > 0).all() and (pooled[real & ~second] == 0).all()


def test_empty_slots_and_padded_rows_weigh_nothing():
    objective, _ = make_objective("sop", CFG)
    packed, _ = both("sop_labels")
    assert float(objective.weights(packed)["sop_loss"]) == 8
    packed["example_weights"] = np.array([1, 1, 0], np.float32)
    assert float(objective.weights(packed)["sop_loss"]) == 4
    none = dict(packed, example_weights=jnp.zeros(3))
    params = objective.init(jax.random.key(0))
    value, weight = objective.sums(params, none, None)["sop_loss"]
    assert float(value) == float(weight) == 0
