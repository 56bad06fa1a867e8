# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every earlier format can be read and have the right contents.

testdata/checkpoint_format_1.zip: step 1 of a small model, as the last version with that
format wrote it. The values of every parameter count up in 64ths from its `START`; the
average is the parameters + 1.
"""

import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import ROOT

from bertjax import UserError
from bertjax.checkpoints import manifest
from bertjax.checkpoints.manager import (
    Checkpoints,
    describe,
    restore_params,
    warm_start,
)
from bertjax.interop.tensor_layout import unflatten
from bertjax.parallel.mesh import make_mesh
from bertjax.parallel.sharding import path_name
from bertjax.training import optim, read_freeze, schedules
from bertjax.training.frozen import frozen_sizes, join
from bertjax.training.state import (
    init_sharded,
    plan_state,
    with_given,
    with_shardings,
)

SHAPES = {
    "encoder/embeddings/word": (6, 4),
    "encoder/embeddings/norm/scale": (4,),
    "encoder/embeddings/norm/bias": (4,),
    "encoder/layers/mlp/up/kernel": (3, 4, 8),
    "encoder/layers/mlp/up/bias": (3, 8),
    "nsp/kernel": (4, 2),
    "nsp/bias": (2,),
}
START = {"encoder/embeddings/norm/scale": 1.0}
FREEZE = "encoder/embeddings/.*,encoder/layers/.*[:2]"


def make_leaf(path, shape):
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 64
    return jnp.asarray(values + START.get(path, 0))


def make_params():
    return unflatten((path, make_leaf(path, SHAPES[path])) for path in SHAPES)


def make_tx():
    schedule = schedules.make_schedule("constant", 1e-3, 0, 10)
    betas = dict(b1=0.9, b2=0.999, eps=1e-6)
    return optim.make_optimizer("adamw", schedule, clip=1.0, wd=0.01, **betas)


def plan(freeze="", mesh=None):
    """Return (initial state, shapes and shardings for restoring it)."""
    mesh = mesh or make_mesh(devices=jax.devices()[:1])
    tx, sizes = make_tx(), frozen_sizes(make_params(), read_freeze(freeze))
    how = dict(guarded=True, averaged=True, freeze=sizes)
    shapes, places = plan_state(make_params, tx, mesh, (), **how)
    state = init_sharded(make_params, tx, mesh, places, sizes)
    return state, with_shardings(shapes, places)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.fixture
def checkpoints(tmp_path):
    found = Checkpoints(tmp_path, 2, None)
    yield found
    found.close()


def test_the_first_format(checkpoints, tmp_path):
    zipfile.ZipFile(ROOT / "tests/testdata/checkpoint_format_1.zip").extractall(
        tmp_path
    )
    assert manifest.newest_intact(tmp_path, pytest.fail) == 1
    folder = tmp_path / "checkpoints/1"
    assert manifest.read_meta(folder)["format"] == 1 < manifest.FORMAT
    assert describe(folder) == SHAPES
    equal(restore_params(folder), make_params())
    first, wanted = plan()
    state = checkpoints.restore(1, wanted)
    assert int(state.step) == 1 and state.frozen is None
    equal(state.params, make_params())
    equal(state.ema, jax.tree.map(lambda p: p + 1, make_params()))
    _, moments = make_tx().update(
        jax.tree.map(lambda p: p / 2, first.params), first.opt_state, first.params
    )
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6)  # noqa: E731
    jax.tree.map(close, jax.device_get(state.opt_state), jax.device_get(moments))


def test_what_is_frozen_is_saved_once(checkpoints, tmp_path):
    """Frozen parameters are saved once; the model and its average both include them."""
    state, wanted = plan(FREEZE)
    ema = jax.tree.map(lambda p: p + 1, state.params)
    state = state._replace(ema=ema)
    checkpoints.save(1, with_given(state, teacher={"huge": jnp.ones(9)}), {})
    checkpoints.wait()
    folder = tmp_path / "checkpoints/1"
    assert manifest.read_meta(folder)["format"] == 2
    assert describe(folder) == SHAPES  # no teacher
    equal(restore_params(folder), make_params())
    equal(restore_params(folder, part="ema"), join(ema, state.frozen))
    _, wanted_on_eight = plan(FREEZE, make_mesh(2, 2, 2))
    for asked in (wanted, wanted_on_eight):
        equal(checkpoints.restore(1, asked), state)
    # Another run, which may freeze other parameters, reads whole parameters.
    _, whole = plan()
    equal(warm_start(folder, whole.params, lambda text: None), make_params())


@pytest.mark.parametrize("now", ["", "encoder/embeddings/.*"])
def test_another_freeze_has_other_moments(checkpoints, now):
    checkpoints.save(1, plan(FREEZE)[0], {})
    checkpoints.wait()
    with pytest.raises(UserError, match=r"another optim\.freeze"):
        checkpoints.restore(1, plan(now)[1])


def test_parts_say_what_a_state_has():
    state, _ = plan(FREEZE)
    names = {path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(state.frozen)}
    assert names == {name for name in SHAPES if name.startswith("encoder/")}
    taught = with_given(plan()[0], teacher={"encoder": {}})
    assert "frozen" not in taught.parts() and "frozen" in state.parts()
    assert optax.tree.norm(state.frozen) > 0
