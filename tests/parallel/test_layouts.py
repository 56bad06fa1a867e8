# SPDX-License-Identifier: Apache-2.0
"""20 steps give the same result on any mesh and with any number of micro-batches."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import tiny_encoder, train_steps

from bertjax.objectives.make_objective import make_objective
from bertjax.parallel.mesh import make_mesh

STEPS, B, L, P, V = 20, 16, 12, 3, 64
CFG = tiny_encoder(V, L, num_hidden_layers=2)


def make_batch(step):
    """Make rows with different numbers of tokens and predictions, some with none."""
    draw = np.random.default_rng(step)
    lengths = draw.integers(4, L + 1, B)[:, None]
    predictions = draw.integers(0, P + 1, B)
    predictions[: B // 4] = 0  # a device or micro-batch without any
    return {
        "input_ids": draw.integers(0, V, (B, L)).astype(np.int32),
        "attention_mask": (np.arange(L) < lengths).astype(np.int32),
        "token_type_ids": draw.integers(0, 2, (B, L)).astype(np.int32),
        "mlm_positions": draw.integers(0, 4, (B, P)).astype(np.int32),
        "mlm_ids": draw.integers(0, V, (B, P)).astype(np.int32),
        "mlm_weights": (np.arange(P) < predictions[:, None]).astype(np.float32),
        "nsp_labels": draw.integers(0, 2, B).astype(np.int32),
    }


def run(mesh, accumulate=1, dropout=0.0, **change):
    """Return (rows of metrics, final parameters)."""
    cfg = dataclasses.replace(CFG, **{"hidden_dropout_prob": dropout} | change)
    objective, _ = make_objective("mlm+nsp", cfg)
    batches = [make_batch(step % 2) for step in range(STEPS)]  # to be learned
    return train_steps(objective, mesh, batches, accumulate)


def single():
    return make_mesh(devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def one_device():
    return run(single())


def compare(got, expected, tolerance=1e-5):
    for a, b in zip(got[0], expected[0], strict=True):
        assert a["tokens"] == b["tokens"]
        for name in ("train/loss", "train/mlm_loss", "train/nsp_loss"):
            assert a[name] == pytest.approx(b[name], rel=tolerance), name
    flat = [
        np.concatenate([x.ravel() for x in jax.tree.leaves(r[1])])
        for r in (got, expected)
    ]
    difference = np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])
    assert difference < tolerance


def test_the_run_learns(one_device):
    losses = [float(row["train/loss"]) for row in one_device[0]]
    assert all(np.isfinite(losses)) and losses[-1] < losses[0]
    assert float(one_device[0][0]["optim/lr"]) == pytest.approx(3e-3 / 4)


@pytest.mark.parametrize(
    "layout",
    [
        (2, 2, 2),
        pytest.param((1, 4, 2), marks=pytest.mark.slow),
        pytest.param((8, 1, 1), marks=pytest.mark.slow),
        pytest.param((2, 1, 2), marks=pytest.mark.slow),
    ],
)
def test_meshes_agree(one_device, layout):
    devices = jax.devices()[: int(np.prod(layout))]
    compare(run(make_mesh(*layout, devices=devices)), one_device)


@pytest.mark.parametrize(
    "change",
    [
        dict(embedding_size=8, num_hidden_groups=1, num_hidden_layers=3),
        dict(
            position_embedding_type="rope",
            norm_position="pre",
            first_attention_norm=False,
            final_norm=True,
            local_attention=6,
            global_attn_every_n_layers=2,
            mlp_type="glu",
            tie_word_embeddings=False,
        ),
        dict(
            qk_norm=True,
            zero_init_outputs=True,
            final_logit_softcapping=15.0,
            embedding_skip=True,
            value_skip=True,
            unet_skips=True,
            num_hidden_layers=3,
        ),
    ],
    ids=["albert", "modernbert", "switches"],
)
@pytest.mark.slow
def test_meshes_agree_on_relatives_of_bert(change):
    compare(run(make_mesh(2, 2, 2), **change), run(single(), **change))


@pytest.mark.parametrize(
    "devices, parts", [(1, 4), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_accumulation_agrees(one_device, devices, parts):
    mesh = make_mesh(devices, devices=jax.devices()[:devices])
    compare(run(mesh, accumulate=parts), one_device)


@pytest.mark.slow
def test_dropout_depends_on_seed_and_step_alone(one_device):
    """A repeated run is equal bit for bit, and differs from a run without dropout."""
    a, b = (run(single(), dropout=0.3) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert a[0][3]["train/loss"] != one_device[0][3]["train/loss"]
