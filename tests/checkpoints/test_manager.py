# SPDX-License-Identifier: Apache-2.0
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bertjax import RunError, UserError
from bertjax.checkpoints import manager, manifest
from bertjax.checkpoints.manager import (
    Checkpoints,
    describe,
    restore_params,
    warm_start,
)
from bertjax.parallel.mesh import make_mesh
from bertjax.training.optim import make_optimizer
from bertjax.training.state import (
    State,
    in_pairs,
    init_sharded,
    merge,
    plan_state,
    with_shardings,
)

TX = optax.adam(1e-3)


def init(width=4):
    """Make parameters whose paths the sharding table knows."""
    return {
        "encoder": {
            "embeddings": {"word": jnp.arange(8.0 * width).reshape(8, width)},
            "pooler": {"kernel": jnp.ones((width, width)), "bias": jnp.zeros(width)},
        },
        "nsp": {"kernel": jnp.full((width, 2), 0.5), "bias": jnp.zeros(2)},
    }


def make(mesh=None, make_params=init, tx=TX, more=(False, False)):
    """Return (state, shapes and shardings for restoring it).

    more: whether it has a guard, a moving average, an average of the tail.
    """
    mesh = mesh or make_mesh(2, 2, 2)
    shapes, shardings = plan_state(make_params, tx, mesh, (), *more)
    state = init_sharded(make_params, tx, mesh, shardings)
    return state, with_shardings(shapes, shardings)


@pytest.fixture
def saved(tmp_path):
    made = []

    def open_checkpoints(keep_last=2, keep_every=None, folder=tmp_path):
        made.append(Checkpoints(folder, keep_last, keep_every))
        return made[-1]

    yield open_checkpoints
    for checkpoints in made:
        checkpoints.close()


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def test_save_and_restore_on_other_meshes(saved, tmp_path):
    state, wanted = make()
    state = State(state.step + 7, *state[1:])
    checkpoints = saved()
    checkpoints.save(7, state, {"tokens": 123})
    checkpoints.wait()
    assert manifest.newest_intact(tmp_path, pytest.fail) == 7
    folder = tmp_path / "checkpoints/7"
    meta = manifest.read_meta(folder)
    assert (meta["step"], meta["tokens"], meta["format"]) == (7, 123, manifest.FORMAT)
    for mesh in (make_mesh(2, 2, 2), make_mesh(devices=jax.devices()[:1])):
        _, wanted = make(mesh)
        back = checkpoints.restore(7, wanted)
        equal(back, state)
        for leaf, asked in zip(*map(jax.tree.leaves, (back, wanted)), strict=True):
            assert leaf.sharding == asked.sharding and leaf.dtype == asked.dtype
    assert describe(folder)["nsp/kernel"] == (4, 2)
    equal(restore_params(folder), state.params)


def test_donated_state_is_copied_before_save_returns(saved, tmp_path):
    state, wanted = make()
    checkpoints = saved()
    before = jax.device_get(state.params)
    checkpoints.save(1, state, {})
    jax.tree.map(lambda x: x.delete(), state)
    checkpoints.wait()
    equal(checkpoints.restore(1, wanted).params, before)


def test_pruning(saved, tmp_path):
    state, _ = make()
    checkpoints = saved(keep_last=2, keep_every=4)
    for step in range(1, 10):
        checkpoints.save(step, state, {})
        checkpoints.wait()
    assert manifest.steps(tmp_path) == [4, 8, 9]
    left = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert left == ["4", "8", "9"]


def test_some_are_kept_beside_the_newest(saved, tmp_path):
    state, _ = make()
    checkpoints = saved(keep_last=1)
    for step, keep in ((1, ()), (2, {1, None}), (3, {2, 1})):
        checkpoints.save(step, state, {}, keep)
        checkpoints.wait()
    assert manifest.steps(tmp_path) == [1, 2, 3]


def test_in_a_bucket_the_manifest_makes_a_checkpoint(saved, tmp_path, monkeypatch):
    """In a bucket nothing is renamed, as a rename would copy each object in turn; a
    checkpoint counts when its manifest is written."""
    from etils import epath

    state, wanted = make()
    folder = epath.Path(tmp_path)
    for module in (manifest, manager):
        monkeypatch.setattr(module, "is_remote", lambda path: True)
    (tmp_path / "checkpoints" / "9" / "state").mkdir(parents=True)  # a killed run's
    assert manifest.steps(folder) == []
    checkpoints = saved(keep_last=2, folder=folder)
    assert not (tmp_path / "checkpoints" / "9").exists()
    for step in (1, 2, 3, 3):
        checkpoints.save(step, state, {})
        checkpoints.wait()
    assert manifest.steps(folder) == [2, 3]
    assert manifest.newest_intact(folder, pytest.fail) == 3
    equal(checkpoints.restore(3, wanted), state)
    checkpoints.drop_after(2)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["2"]


@pytest.mark.parametrize("remote", [False, True])
def test_what_cannot_be_deleted_costs_no_new_one(saved, tmp_path, monkeypatch, remote):
    from etils import epath

    state, wanted = make()
    folder = epath.Path(tmp_path) if remote else tmp_path
    for module in (manifest, manager):
        monkeypatch.setattr(module, "is_remote", lambda path: remote)
    checkpoints = saved(keep_last=1, folder=folder)
    checkpoints.save(1, state, {})
    checkpoints.wait()

    def denied(self, step):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Checkpoints, "_delete", denied)
    checkpoints.save(2, state, {})
    with pytest.raises(RunError, match="cannot delete an older checkpoint"):
        checkpoints.wait()
    assert manifest.newest_intact(folder, pytest.fail) == 2
    equal(checkpoints.restore(2, wanted), state)


def test_a_step_that_was_saved_meanwhile_is_saved_again(saved, tmp_path):
    """A run of the same process saved the step, interrupted in the middle of it."""
    state, wanted = make()
    newer = state._replace(params=jax.tree.map(lambda x: x + 1, state.params))
    for checkpoints, one in ((saved(), state), (saved(), newer)):
        checkpoints.save(1, one, {})
        checkpoints.wait()
        equal(checkpoints.restore(1, wanted), one)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["1"]
    assert not manifest.problem(tmp_path / "checkpoints/1")


def test_leftovers_of_a_killed_run_go(saved, tmp_path):
    for name in ("saving-4", "deleting-2", "3"):
        (tmp_path / "checkpoints" / name / "state").mkdir(parents=True)
    saved()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["3"]


def test_nothing_half_written_gets_a_number(saved, tmp_path, monkeypatch):
    """The disk fills up at the manifest, the last file to be written."""
    state, _ = make()
    checkpoints = saved()
    checkpoints.save(1, state, {})
    checkpoints.wait()

    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "write_manifest", full)
    checkpoints.save(2, state, {})
    with pytest.raises(RunError, match=r"cannot write .*/2: .*No space left"):
        checkpoints.wait()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["1"]
    assert manifest.newest_intact(tmp_path, pytest.fail) == 1


def test_a_file_in_the_place_of_the_folder(saved, tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(UserError, match="checkpoints is not a directory"):
        saved()


def test_frozen_parameters_of_any_shape_are_described(saved, tmp_path):
    state, _ = make()
    word = {"encoder": {"embeddings": {"word": jnp.zeros((2, 4))}}}
    frozen = {**word, "mine": {"scale": jnp.zeros(())}}
    checkpoints = saved()
    checkpoints.save(1, state._replace(frozen=frozen), {})
    checkpoints.wait()
    shapes = describe(tmp_path / "checkpoints/1")
    assert shapes["mine/scale"] == ()
    assert shapes["encoder/embeddings/word"] == (10, 4)


def test_a_checkpoint_of_another_model_is_refused(saved, tmp_path):
    state, _ = make()
    checkpoints = saved()
    checkpoints.save(1, state, {})
    checkpoints.wait()
    _, wanted = make(make_params=lambda: init(8))
    with pytest.raises(UserError, match=r"another model: encoder/embeddings/word"):
        checkpoints.restore(1, wanted)
    _, wanted = make(make_params=lambda: {"encoder": init()["encoder"]})
    with pytest.raises(UserError, match=r"another model: nsp/bias has shape \(2,\)"):
        checkpoints.restore(1, wanted)


def test_guard_and_average_come_and_go(saved):
    """They start fresh if the checkpoint has none, and are dropped if not requested.

    Another optimizer's moments are refused, whatever else differs.
    """
    both, neither = make(more=(True, True)), make()
    checkpoints = saved()
    params = jax.tree.map(lambda x: x + 1, both[0].params)
    for step, (state, _) in enumerate((both, neither), 1):
        checkpoints.save(step, state._replace(params=params), {})
    checkpoints.wait()
    back = checkpoints.restore(2, both[1])
    equal(back, both[0]._replace(params=params, ema=params))
    for leaf, asked in zip(*map(jax.tree.leaves, (back, both[1])), strict=True):
        assert leaf.sharding == asked.sharding
    equal(checkpoints.restore(1, neither[1]), neither[0]._replace(params=params))
    for tx in (optax.sgd(1e-3), optax.lion(1e-3)):
        for more in ((True, True), (False, False)):
            for step in (1, 2):
                with pytest.raises(UserError, match="of another optimizer"):
                    checkpoints.restore(step, make(tx=tx, more=more)[1])


def test_the_average_of_a_tail_comes_and_goes(saved):
    """It starts with a count of 0 if the checkpoint has none or a moving average."""
    tail, moving, none = (
        make(more=(False, *more))
        for more in ((False, True), (True, False), (False, False))
    )
    checkpoints = saved(keep_last=3)
    made = tail[0]._replace(averaged=tail[0].averaged + 3)
    for step, state in enumerate((made, moving[0], none[0]), 1):
        checkpoints.save(step, state, {})
    checkpoints.wait()
    equal(checkpoints.restore(1, tail[1]), made)
    for step in (2, 3):
        equal(checkpoints.restore(step, tail[1]), tail[0])
    equal(checkpoints.restore(1, moving[1]), moving[0])
    equal(checkpoints.restore(1, none[1]), none[0])


def test_muons_momentum_of_before_is_read(saved):
    """The first version with Newton-Schulz in bfloat16 stored it in a pair."""

    def layered():
        kernel = jnp.arange(128.0).reshape(2, 8, 8)
        params = init()
        params["encoder"]["layers"] = {"mlp": {"down": {"kernel": kernel}}}
        return params

    settings = dict(wd=0.0, b1=0.9, b2=0.99, eps=1e-6, clip=1.0)
    tx = make_optimizer("normuon", lambda step: 0.1, ns_dtype="bfloat16", **settings)
    state, wanted = make(make_params=layered, tx=tx)
    grads = jax.tree.map(jnp.ones_like, state.params)
    state = state._replace(opt_state=tx.update(grads, state.opt_state, state.params)[1])
    checkpoints = saved()
    for step, moments in enumerate((in_pairs(state.opt_state), state.opt_state)):
        checkpoints.save(step, state._replace(opt_state=moments), {})
    checkpoints.wait()
    assert jax.tree.structure(in_pairs(state.opt_state)) != jax.tree.structure(
        state.opt_state
    )
    for step in (0, 1):
        back = checkpoints.restore(step, wanted)
        equal(back, state)
        for leaf, asked in zip(*map(jax.tree.leaves, (back, wanted)), strict=True):
            assert leaf.sharding == asked.sharding


def test_damage_is_seen(saved, tmp_path):
    state, _ = make()
    checkpoints = saved()
    for step in (1, 2):
        checkpoints.save(step, state, {})
    checkpoints.wait()
    files = [p for p in (tmp_path / "checkpoints/2").rglob("*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(bytes(data))
    said = []
    assert manifest.newest_intact(tmp_path, said.append) == 1
    assert "checkpoints/2" in said[0]


# ---------------------------------------------------------------- init_from
@pytest.fixture
def other(saved, tmp_path):
    """A checkpoint with an encoder without a pooler, and an MLM bias."""

    def params():
        encoder = {"embeddings": {"word": jnp.full((8, 4), 3.0)}}
        return {"encoder": encoder, "mlm": {"bias": jnp.full(8, 2.0)}}

    checkpoints = saved(folder=tmp_path / "other")
    checkpoints.save(5, make(make_params=params)[0], {})
    checkpoints.wait()
    return tmp_path / "other/checkpoints/5"


def test_warm_start_takes_what_matches(other):
    state, wanted = make()
    said = []
    taken = warm_start(other, wanted.params, said.append)
    assert list(taken) == ["encoder"]
    word = wanted.params["encoder"]["embeddings"]["word"]
    assert taken["encoder"]["embeddings"]["word"].sharding == word.sharding
    merged = merge(state.params, taken)
    assert jax.tree.structure(merged) == jax.tree.structure(state.params)
    assert (merged["encoder"]["embeddings"]["word"] == 3).all()
    equal(merged["nsp"], state.params["nsp"])
    text = "\n".join(said)
    assert "1 parameters matched" in text
    assert "not in it, newly initialized: encoder/pooler/bias" in text
    assert "nsp/kernel" in text and "in it, not used: mlm/bias" in text


def test_warm_start_refuses_other_shapes_and_half_encoders(other):
    _, wanted = make(make_params=lambda: init(8))
    with pytest.raises(UserError, match=r"word has shape \(8, 4\) there, \(8, 8\)"):
        warm_start(other, wanted.params, pytest.fail)

    def larger():
        params = init()
        norm = {"scale": jnp.ones(4), "bias": jnp.zeros(4)}
        params["encoder"]["embeddings"]["norm"] = norm
        return params

    _, wanted = make(make_params=larger)
    with pytest.raises(UserError, match="lacks encoder/embeddings/norm/bias"):
        warm_start(other, wanted.params, pytest.fail)

    class Larger:
        def describe(self):
            return {"encoder/embeddings/word": (8, 4), "encoder/final_norm/scale": (4,)}

    _, wanted = make()
    with pytest.raises(
        UserError, match="has encoder/final_norm/scale, the config has not"
    ):
        warm_start(Larger(), wanted.params, pytest.fail)


def test_meta_is_one_json_object(saved, tmp_path):
    state, _ = make()
    checkpoints = saved()
    checkpoints.save(3, state, {"config": {"a": {"b": None}}})
    checkpoints.wait()
    text = (tmp_path / "checkpoints/3/meta.json").read_text()
    assert json.loads(text)["config"] == {"a": {"b": None}}
