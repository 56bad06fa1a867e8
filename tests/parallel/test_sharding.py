# SPDX-License-Identifier: Apache-2.0
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bertjax import UserError
from bertjax.assembly import command_line, resolve
from bertjax.models.families import FAMILIES
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel import feed
from bertjax.parallel.mesh import make_mesh, peak_flops
from bertjax.parallel.sharding import (
    PARAM_AXES,
    axes_of,
    constrain,
    gather_params,
    param_shardings,
    path_name,
    spec,
    stored_spec,
)
from bertjax.training.layerwise import decay_mask
from bertjax.training.optim import make_optimizer
from bertjax.training.state import init_sharded, plan_state

SHIPPED = ("bert.py", "roberta.py", "quickstart.py", "albert.py", "electra.py:base")
SHIPPED += ("t5.py:v1_1_base", "bart.py", "plato.py")
SHIPPED += ("bert.py --config.model.relative_attention_num_buckets=32",)
SKIPS = (
    f"--config.model.{s}=True" for s in ("embedding_skip", "value_skip", "unet_skips")
)
SHIPPED += (" ".join(["electra.py:base", *SKIPS]),)
LAYOUTS = [(8, 1, 1), (1, 8, 1), (1, 4, 2), (2, 2, 2), (4, 1, 2)]


def shapes_of(name):
    """Return (cfg, shapes of the parameters) of a shipped config."""
    values = command_line.parse(f"--config={name}".split())
    cfg = resolve.encoder_config(values.config, 30_522)
    objective, cfg = make_objective(values.config.objective, cfg)
    return objective, cfg, jax.eval_shape(lambda: objective.init(jax.random.key(0)))


def paths(tree):
    return [path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)]


# ---------------------------------------------------------------- the table
def test_each_leaf_has_one_row_and_each_row_a_leaf():
    used, rows = set(), {row for row, _ in PARAM_AXES}
    for name in SHIPPED:
        objective, _, shapes = shapes_of(name)
        own = [row for row, _ in (*PARAM_AXES, *objective.shardings)]
        rows.update(own)
        for path in paths(shapes):
            found = [row for row in own if re.fullmatch(row, path)]
            assert len(found) == 1, (path, found)
            used.update(found)
    assert used == rows


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_rounded_and_decays_goes_by_name_in_every_family(family):
    """The rule by axes (for heads from outside) agrees with names in shipped models."""
    made = command_line.parse(
        ["--config=bert.py", f"--config.model.family={family}"]
    ).config
    made.model.size, size = next(iter(FAMILIES[family].sizes.items()))
    if "num_decoder_layers" in {**FAMILIES[family].fixed, **size}:
        made.objective = "denoise"  # others have no decoder
    cfg = resolve.encoder_config(made, 1000)
    names = ["classify", "regress", "tag", "span", "choose"]
    if cfg.num_decoder_layers:
        names = ["denoise", "seq2seq"]
    else:
        names += ["clm"] if cfg.is_decoder else ["mlm+nsp", "sop", "electra"]
    names += ["denoise"] * (cfg.num_decoder_layers > 0)
    has_none = cfg.hidden_size % 4 or cfg.relative_attention_num_buckets
    if has_none and "electra" in names:
        names.remove("electra")
    for name in names:
        objective, _ = make_objective(name, cfg)
        shapes = jax.eval_shape(lambda o=objective: o.init(jax.random.key(0)))
        rows = objective.shardings
        found = jax.eval_shape(
            lambda p, r=rows: gather_params(p, "bfloat16", r), shapes
        )
        by_name = jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key not in ("bias", "scale"), shapes
        )
        assert jax.tree.map(lambda x: x.dtype == jnp.bfloat16, found) == by_name
        assert decay_mask(shapes) == by_name


def test_a_temperature_is_not_rounded():
    rows = (("own/temperature", ""), ("own/layers/map", "layers embed width"))
    rows += (("own/layers/center", "layers width"), ("own/center", "width"))
    made = {"temperature": jnp.ones(()), "center": jnp.ones(4)}
    made["layers"] = {"center": jnp.ones((2, 4)), "map": jnp.ones((2, 4, 4))}
    found = gather_params({"own": made}, "bfloat16", rows)["own"]
    assert {k: found[k].dtype for k in ("temperature", "center")} == dict.fromkeys(
        ("temperature", "center"), jnp.float32
    )
    assert found["layers"]["center"].dtype == jnp.float32
    assert found["layers"]["map"].dtype == jnp.bfloat16


def test_an_unknown_leaf_is_not_replicated_in_silence():
    with pytest.raises(UserError, match="0 rows"):
        axes_of("encoder/layers/attention/key/gate")
    with pytest.raises(UserError, match="2 rows"):
        axes_of("nsp/bias", (*PARAM_AXES, ("nsp/.*", "classes")))
    mesh = make_mesh(8)
    wrong = {"nsp": {"bias": jax.ShapeDtypeStruct((2, 2), jnp.float32)}}
    with pytest.raises(UserError, match="its row of `shardings` says 'classes'"):
        param_shardings(wrong, mesh)
    own = {"bag": {"kernel": jax.ShapeDtypeStruct((8, 2), jnp.float32)}}
    says = "the head bag: .* for bag/kernel, 'embbed width', has the unknown axis 'embb"
    with pytest.raises(UserError, match=says):
        param_shardings(own, mesh, [("bag/kernel", "embbed width")])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["bert.py:tiny", "bert.py:base", "roberta.py:large"])
def test_shipped_sizes_fit_every_layout(name, layout):
    mesh = make_mesh(*layout)
    _, _, shapes = shapes_of(name)
    where = param_shardings(shapes, mesh)
    kernel = where["encoder"]["layers"]["attention"]["query"]["kernel"]
    _, fsdp, tensor = layout
    whole = shapes["encoder"]["layers"]["attention"]["query"]["kernel"].shape
    n, d, heads, width = whole
    computed = NamedSharding(mesh, spec("layers embed heads head")).shard_shape(whole)
    assert computed == (n, d // fsdp, heads // tensor, width)
    # Master parameters and moments are split over the data axis too.
    assert kernel.num_devices == 8
    assert math.prod(kernel.shard_shape(whole)) * (8 if d > 128 else fsdp * tensor) == (
        math.prod(whole)
    )


def test_what_is_kept_is_split_over_the_data_axis_too():
    mesh = make_mesh(4, 2, 1)

    def kept(axes, shape):
        return stored_spec(axes, shape, mesh)

    assert kept("vocab embed", (30_522, 2048)) == P(None, ("fsdp", "data"))
    assert kept("vocab embed", (30_720, 768)) == P("data", "fsdp")
    assert kept("vocab embed", (30_522, 768)) == P(None, ("fsdp", "data"))
    assert kept("layers embed mlp", (12, 768, 3072)) == (
        P(None, ("fsdp", "data"), "tensor")
    )
    assert kept("layers mlp embed", (12, 3072, 768)) == (
        P(None, ("tensor", "data"), "fsdp")
    )
    assert kept("layers heads head embed", (12, 12, 64, 768)) == (
        P(None, "tensor", "data", "fsdp")
    )
    assert kept("layers width", (12, 768)) == P(None, None)  # small
    assert kept("vocab embed", (30_523, 2 * 767)) == P(None, "fsdp")  # no axis divides


def test_what_does_not_divide_is_refused():
    _, _, shapes = shapes_of("bert.py:tiny")  # two heads
    with pytest.raises(UserError, match=r"mesh\.tensor=4 does not divide the 2 heads"):
        param_shardings(shapes, make_mesh(2, 1, 4))


def test_specs():
    assert spec("layers embed heads head") == P(None, ("fsdp",), ("tensor",), None)
    assert spec("batch") == P(("data", "fsdp"))


def test_constrain_needs_no_mesh():
    x = jnp.ones((2, 3, 4))
    assert constrain(x, "batch length embed") is x


# ---------------------------------------------------------------- the state
def test_moments_lie_like_their_parameters():
    """Moments are created sharded as their parameters are, found by path, not shape."""
    mesh = make_mesh(2, 2, 2)
    objective, _, _ = shapes_of("bert.py:tiny")
    tx = make_optimizer(
        "adamw", lambda step: 0.1, wd=0.1, b1=0.9, b2=0.99, eps=1e-6, clip=1.0
    )

    def init():
        return objective.init(jax.random.key(0))

    shapes, shardings = plan_state(init, tx, mesh, objective.shardings)
    state = init_sharded(init, tx, mesh, shardings)
    for made, planned, where in zip(
        *map(jax.tree.leaves, (state, shapes, shardings)), strict=True
    ):
        assert made.shape == planned.shape and made.sharding == where
    of = dict(zip(paths(state.params), jax.tree.leaves(state.params), strict=True))
    seen = 0
    for path, leaf in zip(
        paths(state.opt_state), jax.tree.leaves(state.opt_state), strict=True
    ):
        match = re.search(r"(?:mu|nu)/(.*)", path)
        if match:
            assert leaf.sharding == of[match[1]].sharding, path
            assert not np.asarray(leaf).any()
            seen += 1
        else:
            assert leaf.sharding.is_fully_replicated
    assert seen == 2 * len(of)
    word = state.params["encoder"]["embeddings"]["word"]
    assert word.addressable_shards[0].data.shape == (15_261, 64)


def test_parameters_do_not_depend_on_the_mesh():
    objective, _, _ = shapes_of("bert.py:tiny")
    tx = make_optimizer(
        "adamw", lambda step: 0.1, wd=0.1, b1=0.9, b2=0.99, eps=1e-6, clip=0.0
    )
    made = []
    for layout in ((8, 1, 1), (1, 4, 2)):
        mesh = make_mesh(*layout)

        def init():
            return objective.init(jax.random.key(0))

        _, shardings = plan_state(init, tx, mesh, ())
        made.append(jax.device_get(init_sharded(init, tx, mesh, shardings).params))
    jax.tree.map(np.testing.assert_array_equal, *made)


# ---------------------------------------------------------------- meshes
def test_meshes():
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(2, -1, 2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    one = make_mesh(devices=jax.devices()[:1])
    assert one.size == 1
    assert peak_flops(one) is None


@pytest.mark.parametrize(
    "sizes, word",
    [
        ((3, 1, 1), "asks for 3 devices, there are 8"),
        ((16, 1, 1), "asks for 16"),
        ((-1, 3, 1), "3 does not divide 8"),
        ((-1, -1, 1), "one of them may be -1"),
        ((0, 1, 1), "positive"),
        ((-1, 1, -2), "positive"),
    ],
)
def test_bad_meshes(sizes, word):
    with pytest.raises(UserError, match=word):
        make_mesh(*sizes)


# ---------------------------------------------------------------- feeding
@pytest.mark.parametrize(
    "rows, accumulate, word",
    [
        (12, 1, "not divisible by the mesh's data x fsdp = 8"),
        (16, 3, "accumulate=3 does not divide"),
        (16, 4, "4 rows"),
        (16, 0, "accumulate=0"),
    ],
)
def test_bad_batch_sizes(rows, accumulate, word):
    with pytest.raises(UserError, match=word):
        feed.check_batch_size(make_mesh(4, 2), rows, accumulate)
    feed.check_batch_size(make_mesh(4, 2), 16, 2)
    feed.check_batch_size(make_mesh(2, 2, 2), 4, 1)


def test_one_process_makes_all_rows():
    assert feed.local_rows(make_mesh(4, 2), 16).tolist() == list(range(16))


def test_rows_of_a_process_need_not_be_contiguous(monkeypatch):
    class Sharding:  # this process has two of four devices; "twin" shares a's rows
        def addressable_devices_indices_map(self, shape):
            low, high = (slice(0, 2),), (slice(4, 6),)
            return {"a": low, "b": high, "twin of a": low}

    monkeypatch.setattr(feed, "batch_sharding", lambda mesh: Sharding())
    assert feed.local_rows(None, 8).tolist() == [0, 1, 4, 5]


def test_batches_arrive_split_over_data_and_fsdp():
    mesh = make_mesh(2, 2, 2)
    batch = {"a": np.arange(24).reshape(8, 3), "b": np.arange(8, dtype=np.float32)}
    with jax.transfer_guard("disallow"):
        fed = feed.to_devices([batch, batch], mesh, [8, 8])
        got = next(fed)
        with pytest.raises(Exception, match="Disallowed host-to-device"):
            got["a"] + batch["a"]  # the guard still holds between batches
    fed.close()
    np.testing.assert_array_equal(got["b"] + batch["b"], 2 * batch["b"])
    for name, rows in batch.items():
        np.testing.assert_array_equal(got[name], rows)
        assert got[name].addressable_shards[0].data.shape[0] == 2


def test_a_flag_sums_to_its_hosts():
    mesh = make_mesh(8)
    assert int(feed.value_per_device(mesh, np.int32(0)).sum()) == 0
    assert int(feed.value_per_device(mesh, np.int32(1)).sum()) == 8


class Device:
    """A CPU device with the attributes of another kind of device."""

    def __init__(self, device, **more):
        self.device = device
        self.__dict__.update(more)

    def __getattr__(self, name):
        return getattr(self.device, name)


def test_data_alone_goes_between_slices():
    """Only the data axis may span the two slices of a multi-slice pod."""
    kind = dict(platform="tpu", device_kind="TPU v4", core_on_chip=0)
    devices = [
        Device(d, slice_index=i // 4, coords=(i % 2, i // 2 % 2, 0), **kind)
        for i, d in enumerate(jax.devices()[:8])
    ]
    mesh = make_mesh(2, 2, 2, devices=devices)
    assert [len({d.slice_index for d in part.flat}) for part in mesh.devices] == [1, 1]
    with pytest.raises(UserError, match="a multiple of the 2 slices"):
        make_mesh(1, 4, 2, devices=devices)


def test_any_axis_goes_between_machines_with_gpus():
    """Processes are numbered alternately over two machines, Slurm's cyclic order."""
    devices = [
        Device(d, platform="gpu", device_kind="NVIDIA H100", slice_index=i % 2)
        for i, d in enumerate(jax.devices()[:8])
    ]
    assert make_mesh(1, 8, 1, devices=devices).shape["fsdp"] == 8
    mesh = make_mesh(-1, 4, 1, devices=devices)
    assert [len({d.slice_index for d in part.flat}) for part in mesh.devices] == [1, 1]
