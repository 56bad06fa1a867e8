# SPDX-License-Identifier: Apache-2.0
"""How arrays lie on the mesh: one table from paths to axes, one from axes to mesh.

The rows serve the optimizer's moments too, since their paths end like the
parameters' own. What is kept between steps is also split over the data axis
(`stored_spec`): a step gathers the parameters in the dtype it computes with, and sums
gradients where they are kept (Xu et al. 2020, arXiv 2004.13336; ZeRO's stage 1).
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bertjax import UserError

ParamAxes = Iterable[tuple[str, str]]
Path = tuple[Any, ...]

# Path (regular expression, whole path) -> logical axes. A leaf matches exactly one.
PARAM_AXES: tuple[tuple[str, str], ...] = (
    (r"encoder/embeddings/word|mlm/decoder", "vocab embed"),
    (r"(en|de)coder/embeddings/(position|token_type)", "table embed"),
    (r"encoder/embeddings/streams/[a-z0-9_]+", "table embed"),
    (r"(en|de)coder/embeddings/relative", "table heads"),
    (r"(en|de)coder/(embeddings/norm|final_norm)/(scale|bias)", "width"),
    (
        r"(en|de)coder/layers/(attention|cross)/(query|key|value)/kernel",
        "layers embed heads head",
    ),
    (
        r"(en|de)coder/layers/(attention|cross)/(query|key|value)/bias",
        "layers heads head",
    ),
    (r"(en|de)coder/layers/(attention|cross)/output/kernel", "layers heads head embed"),
    (r"(en|de)coder/layers/(attention|cross)/output/bias", "layers width"),
    (r"(en|de)coder/layers/mlp/(up|gate)/kernel", "layers embed mlp"),
    (r"(en|de)coder/layers/mlp/(up|gate)/bias", "layers mlp"),
    (r"(en|de)coder/layers/mlp/down/kernel", "layers mlp embed"),
    (r"(en|de)coder/layers/mlp/down/bias", "layers width"),
    (r"(en|de)coder/layers/(attention|cross|mlp)/norm/(scale|bias)", "layers width"),
    (r"encoder/layers/(embedding|value)_skip/(own|first)", "layers"),
    (r"encoder/layers/unet_skips/early", "layers"),
    (r"encoder/(embeddings/projection|pooler)/kernel", "embed width"),
    (r"encoder/(embeddings/projection|pooler)/bias", "width"),
    (r"(mlm|rtd)/transform/kernel", "embed width"),
    (r"(mlm|rtd)/transform/bias", "width"),
    (r"mlm/norm/(scale|bias)", "width"),
    (r"mlm/bias", "vocab"),
    (r"(nsp|sop|rtd/output)/kernel", "embed classes"),
    (r"(nsp|sop|rtd/output)/bias", "classes"),
)

# Logical axis -> mesh axes; what is not here is replicated. Vocabularies rarely
# divide by a mesh (30,522 = 2 x 15,261), so embeddings are split on their width.
RULES: Mapping[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
}
ACTIVATIONS = {**RULES, "embed": ()}


TEACHER = "teacher"  # among frozen parameters: those of another model, by its own paths
TABLES = "tables"  # among them too: arrays of any dtype, whose rows devices share


def path_name(path: Path) -> str:
    """Write a pytree path as "encoder/embeddings/word"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_of(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path_name."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): leaf for path, leaf in found}


def keys(path: Path) -> list[Any]:
    """Return the names along a pytree's path, None for what has none."""
    return [getattr(entry, "key", None) for entry in path]


def is_stacked(path: Path) -> bool:
    """True for leaves whose axis 0 counts layers: those below "layers" in a tree."""
    return "layers" in keys(path)


def is_matrix(path: Path, leaf: Any) -> bool:
    """True for kernels and tables: what decays, and is rounded to compute with.

    False for biases and norm scales, by their names (BERT's rule), and for whatever has
    fewer than two axes, that of stacked layers aside.
    """
    named = keys(path)[-1] in ("bias", "scale")
    return not named and leaf.ndim >= 2 + is_stacked(path)


def spec(axes: str, rules: Mapping[str, tuple[str, ...]] = RULES) -> P:
    """Turn logical axes ("layers embed mlp") into a PartitionSpec."""
    return P(*(rules.get(a) or None for a in axes.split()))


def axes_of(path: str, rows: ParamAxes = PARAM_AXES) -> str:
    """Return the logical axes of a parameter by its path.

    Raises UserError unless exactly one row matches: a renamed parameter must not
    become replicated in silence.
    """
    own = path.removeprefix(f"{TEACHER}/")
    matches = [axes for pattern, axes in rows if re.fullmatch(pattern, own)]
    if len(matches) != 1:
        raise UserError(
            f"objective: {len(matches)} rows of the sharding table match the parameter "
            f"{path!r}, and one has to: give its Head `shardings`, a row for each of "
            "its leaves, (path, names of its axes), as in docs/add_an_objective.md"
        )
    return matches[0]


def param_shardings(params: Any, mesh: Mesh, extra: ParamAxes = ()) -> Any:
    """Give every leaf of a parameter tree (arrays or shapes) its NamedSharding.

    `extra` holds the rows of the objective's own heads. Raises UserError when a
    row does not fit a parameter, or a mesh axis does not divide an axis of one.
    """
    rows = (*PARAM_AXES, *extra)

    def one(path: Path, leaf: Any) -> NamedSharding:
        name = path_name(path)
        if keys(path)[0] == TABLES:
            return batch_sharding(mesh)
        axes = axes_of(name, rows)
        if len(axes.split()) != leaf.ndim:
            raise UserError(
                f"objective: {name} has shape {leaf.shape}, its row of `shardings` "
                f"says {axes!r}: write the name of an axis for each"
            )
        for size, axis in zip(leaf.shape, axes.split(), strict=True):
            for split in RULES.get(axis, ()):
                if size % mesh.shape[split]:
                    raise UserError(
                        f"mesh.{split}={mesh.shape[split]} does not divide the "
                        f"{size} {axis} of {name}"
                    )
        return NamedSharding(mesh, stored_spec(axes, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(one, params)


SMALL = 2**16  # elements of what is not worth being split over the data axis


def stored_spec(axes: str, shape: tuple[int, ...], mesh: Any) -> P:
    """Return how a parameter of these logical axes is kept: as computed with, and
    split over the data axis too, where one of its axes allows.

    Preferred is the first whose parts fill a TPU's tiles (8 rows of 128), else the
    one with the largest parts. Layers are never parted: the loop takes them one by one.
    """
    names = axes.split()
    parts = [RULES.get(axis, ()) for axis in names]
    n = mesh.shape["data"]
    if n > 1 and math.prod(shape) >= SMALL:
        fits = []
        for i, axis in enumerate(names):
            size = shape[i] // math.prod(mesh.shape[a] for a in parts[i])
            if axis != "layers" and size % n == 0:
                part, tile = size // n, 128 if i == len(names) - 1 else 8
                fits.append((0, i, i) if part % tile == 0 else (1, -part, i))
        if fits:
            i = min(fits)[2]
            parts[i] = (*parts[i], "data")
    return P(*(part or None for part in parts))


def gather_params(params: Any, dtype: str, extra: ParamAxes = ()) -> Any:
    """Give parameters as a step computes with them, from how they are kept.

    Matrices and tables (`is_matrix`) are rounded to `dtype` before they are gathered,
    half of the bytes; the rest stays f32. Gradients come back f32, as they are kept.
    Tables stay where and as they are.
    """
    rows = (*PARAM_AXES, *extra)

    def one(path: Path, leaf: jax.Array) -> jax.Array:
        if keys(path)[0] == TABLES:
            return leaf
        rounded = dtype if is_matrix(path, leaf) else None
        return _gather(leaf, axes_of(path_name(path), rows), rounded)

    return jax.tree_util.tree_map_with_path(one, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(leaf: jax.Array, axes: str, dtype: str | None) -> jax.Array:
    rounded = leaf if dtype is None else leaf.astype(dtype)
    return _pin(rounded, spec(axes))


def _gather_backward(axes, dtype, saved, grad):
    summed = not axes.startswith("layers")  # one by one, in the loop (layers.affine)
    return (keep_gradient(grad.astype(jnp.float32), axes, summed),)


_gather.defvjp(lambda *args: (_gather(*args), ()), _gather_backward)


def keep_gradient(grad: jax.Array, axes: str, summed: bool = True) -> jax.Array:
    """Lay a gradient out as its parameter is kept; first sum it if `summed`.

    Said in two steps, the sum and then the part of each device, it is one collective
    (a reduce-scatter); in one step the compiler cuts the product before it into pieces.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return grad
    grad = _pin(grad, spec(axes)) if summed else grad
    return _pin(grad, stored_spec(axes, grad.shape, mesh))


def _pin(x: jax.Array, where: P | None) -> jax.Array:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, where)


def state_shardings(state: Any, params: Any, shardings: Any, mesh: Mesh) -> Any:
    """Shard a training state: what ends like a parameter's path lies like it.

    `state`: a tree of shapes; `params`, `shardings`: the parameters' trees. Leaves
    with no such ending (counters) are replicated.
    """
    known = {
        path_name(path): (leaf.shape, where)
        for (path, leaf), where in zip(
            jax.tree_util.tree_leaves_with_path(params),
            jax.tree.leaves(shardings),
            strict=True,
        )
    }

    def one(path: Path, leaf: Any) -> NamedSharding:
        parts = path_name(path).split("/")
        for start in range(len(parts)):
            shape, where = known.get("/".join(parts[start:]), (None, None))
            if shape == leaf.shape:
                return where
        return NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(one, state)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Split axis 0 over data and fsdp."""
    return NamedSharding(mesh, spec("batch"))


def constrain(x: jax.Array, axes: str) -> jax.Array:
    """Pin the layout of an activation ("batch length embed") inside jit.

    Without it the compiler may keep activations split like fsdp's parameters. Does
    nothing where no mesh is set, so models run anywhere.
    """
    return _pin(x, spec(axes, ACTIVATIONS))


def gather_rows(arrays: Any) -> Any:
    """Put all rows of a tree of arrays on every device, inside jit.

    Losses over a whole batch need them, and metrics: every process has the rows of all.
    """
    return jax.tree.map(lambda x: constrain(x, " ".join("_" * x.ndim)), arrays)


def spread(x: jax.Array) -> jax.Array:
    """Part axis 0 over all devices of the mesh, inside jit, and leave the others whole.

    For the same work on many small arrays, which devices then need not share. Axis 0
    ends with as many zeros as make its parts equal.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    missing = -len(x) % mesh.size
    x = jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1)))
    return _pin(x, P(mesh.axis_names))


def size_along(axis: str) -> int:
    """Return over how many devices a logical axis of activations is split here."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[a] for a in _split(axis, mesh))


def index_along(axis: str) -> jax.Array | int:
    """Return which part of a logical axis this device has, inside `per_device`."""
    axes = _split(axis, jax.sharding.get_abstract_mesh())
    return jax.lax.axis_index(axes) if axes else 0


def _split(axis: str, mesh: Any) -> tuple[str, ...]:
    return tuple(a for a in ACTIVATIONS.get(axis, ()) if mesh.shape.get(a, 1) > 1)


def per_device(
    function: Callable[..., jax.Array], inputs: Iterable[str], output: str
) -> Callable[..., jax.Array]:
    """Run a function on each device's part of its arguments.

    For what the compiler cannot split by itself: kernels. inputs, output: logical axes
    of arguments and result ("batch length heads").
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    return jax.shard_map(
        function,
        in_specs=tuple(spec(axes, ACTIVATIONS) for axes in inputs),
        out_specs=spec(output, ACTIVATIONS),
        check_vma=False,
    )
