# SPDX-License-Identifier: Apache-2.0
"""CugLM trains the same on any mesh, with any micro-batches, packed or not."""

import functools

import jax
import numpy as np
import pytest
from conftest import train_steps
from test_cuglm import B, R, make, parameters, rows

from bertjax.parallel.mesh import make_mesh


@functools.cache
def eight(packed):
    """Make eight rows from six by repeating two."""
    batch = rows(packed)
    return {name: np.concatenate([x, x[:2]]) for name, x in batch.items()}


def run(mesh, packed, accumulate=1):
    return train_steps(make()[0], mesh, [eight(packed)] * 3, accumulate)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout, parts", [((8, 1, 1), 1), ((2, 2, 2), 1), (None, 4)])
def test_meshes_and_micro_batches_agree(packed, layout, parts):
    one = make_mesh(devices=jax.devices()[:1])
    mesh = make_mesh(*layout, devices=jax.devices()) if layout else one
    got, want = run(mesh, packed, parts), run(one, packed)
    for a, b in zip(got[0], want[0], strict=True):
        for name in ("loss", "mlm_loss", "type_loss", "lm_loss", "nsp_loss"):
            key = f"train/{name}"
            assert float(a[key]) == pytest.approx(float(b[key]), rel=2e-4), key
    for a, b in zip(*(jax.tree.leaves(tree[1]) for tree in (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5)


def test_a_packed_row_is_its_sequences():
    """The losses of sequences in separate rows add up to the packed row's."""
    packed = rows(True)
    segments = packed["segment_ids"]
    parts = []
    for number in (1, 2):
        part = {k: v.copy() for k, v in packed.items() if not k.startswith("cls")}
        inside = (segments == number) | (segments == number + 2)
        start = np.argmax(inside, axis=1)
        order = (np.arange(2 * R) % R + start[:, None]) % R + np.arange(2 * R) // R * R
        moved = np.take_along_axis(inside, order, 1)
        for name in (
            "input_ids", "attention_mask", "token_type_ids", "position_ids",
            "attention_steps",
        ):  # fmt: skip
            part[name] = np.take_along_axis(packed[name], order, 1) * moved
        first = np.arange(2 * R) < R
        part["segment_ids"] = np.where(first, 1, 2).astype(np.int32) * moved
        for name in ("mlm", "lm"):
            at = packed[f"{name}_positions"]
            own = np.take_along_axis(inside, at, 1)
            part[f"{name}_weights"] = packed[f"{name}_weights"] * own
            base = at // R * R
            part[f"{name}_positions"] = base + (at - base - start[:, None]) % R
        part["nsp_labels"] = packed["nsp_labels"][:, number - 1]
        parts.append(part)
    params = parameters()
    loss = jax.jit(lambda batch: make()[0].sums(params, batch, None))
    whole, apart = loss(packed), [loss(part) for part in parts]
    for term in ("mlm_loss", "type_loss", "lm_loss", "nsp_loss"):
        total = sum(float(sums[term].value) for sums in apart)
        assert float(whole[term].value) == pytest.approx(total, rel=1e-5), term
    assert float(whole["nsp_loss"].weight) == 2 * B
