# SPDX-License-Identifier: Apache-2.0
"""Sharding: a table from paths to logical axes, and one from logical to mesh axes.

The rows apply to the optimizer's moments too, because their paths end like those of the
parameters. What is stored between steps is also sharded over the data axis
(`stored_spec`): a step gathers the parameters in its compute dtype, and sums gradients
where they are stored (Xu et al. 2020, arXiv 2004.13336; ZeRO stage 1).
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

# Logical axis -> mesh axes; axes that are not listed are replicated. A mesh rarely
# divides a vocabulary (30,522 = 2 x 15,261), so embeddings are sharded on their width.
RULES: Mapping[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
}
ACTIVATIONS = {**RULES, "embed": ()}
AXES = frozenset(" ".join(axes for _, axes in PARAM_AXES).split())


# Keys among the frozen parameters: TEACHER for another model, by its own paths; TABLES
# for arrays of any dtype whose rows are sharded over the devices.
TEACHER = "teacher"
TABLES = "tables"


def path_name(path: Path) -> str:
    """Return a pytree path as a string such as "encoder/embeddings/word"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_of(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path_name."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): leaf for path, leaf in found}


def keys(path: Path) -> list[Any]:
    """Return the names along a pytree's path, None for an entry without a name."""
    return [getattr(entry, "key", None) for entry in path]


def is_stacked(path: Path) -> bool:
    """Return True for leaves whose axis 0 is the layers: those below "layers"."""
    return "layers" in keys(path)


def is_matrix(path: Path, leaf: Any) -> bool:
    """Return True for kernels and tables: they decay, and are cast to compute with.

    Returns False for biases and norm scales, by their names (BERT's rule), and for
    leaves of fewer than two axes, not counting the axis of stacked layers.
    """
    named = keys(path)[-1] in ("bias", "scale")
    return not named and leaf.ndim >= 2 + is_stacked(path)


def spec(axes: str, rules: Mapping[str, tuple[str, ...]] = RULES) -> P:
    """Turn logical axes ("layers embed mlp") into a PartitionSpec."""
    return P(*(rules.get(a) or None for a in axes.split()))


def axes_of(path: str, rows: ParamAxes = PARAM_AXES) -> str:
    """Return the logical axes of a parameter by its path.

    Raises UserError unless exactly one row matches, because a renamed parameter must
    not silently become replicated.
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
    """Return the NamedSharding of every leaf of a parameter tree (arrays or shapes).

    extra: the rows of the objective's own heads. Raises UserError if a row does not fit
    a parameter, or if a mesh axis does not divide a parameter's axis.
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
        if unknown := sorted({*axes.split()} - AXES):
            raise UserError(
                f"objective: the head {keys(path)[0]}: the row of `shardings` for "
                f"{name}, {axes!r}, has the unknown axis {unknown[0]!r}; known: "
                f"{', '.join(sorted(AXES))}"
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


SMALL = 2**16  # smaller parameters (elements) are not sharded over the data axis


def stored_spec(axes: str, shape: tuple[int, ...], mesh: Any) -> P:
    """Return the PartitionSpec with which a parameter is stored between steps.

    It is that of the computation, and additionally one of the axes is sharded over the
    data axis, if one is divisible. The first axis whose parts fill a TPU's tiles (8
    rows of 128) is preferred, otherwise the one with the largest parts. The layers axis
    is never sharded, because the loop reads one layer at a time.
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
    """Convert parameters from their stored layout to that of the computation.

    Matrices and embedding tables (`is_matrix`) are cast to `dtype` before they are
    gathered, which moves half of the bytes; the rest stays f32. Gradients are f32 in
    the stored layout. The arrays in TABLES are returned unchanged.
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
    # Gradients of layers are summed one by one in the loop (layers.affine).
    summed = not axes.startswith("layers")
    return (keep_gradient(grad.astype(jnp.float32), axes, summed),)


_gather.defvjp(lambda *args: (_gather(*args), ()), _gather_backward)


def keep_gradient(grad: jax.Array, axes: str, summed: bool = True) -> jax.Array:
    """Shard a gradient like its stored parameter; sum it first if `summed`.

    Two constraints, the sum and then each device's part, become one collective (a
    reduce-scatter). With a single constraint the compiler splits the matrix product
    before it into pieces.
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
    """Return the shardings of a training state.

    A leaf whose path ends with a parameter's path, and that has its shape, gets that
    parameter's sharding; other leaves (counters) are replicated. state: a tree of
    shapes; params, shardings: the parameters' trees.
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
    """Return the sharding of a batch: axis 0 over data and fsdp."""
    return NamedSharding(mesh, spec("batch"))


def constrain(x: jax.Array, axes: str) -> jax.Array:
    """Constrain the sharding of an activation ("batch length embed") inside jit.

    Without it the compiler may shard activations like fsdp's parameters. It does
    nothing if no mesh is set, so models run anywhere.
    """
    return _pin(x, spec(axes, ACTIVATIONS))


def gather_rows(arrays: Any) -> Any:
    """Gather all rows of a tree of arrays on every device, inside jit.

    Losses over a whole batch need them, and so do metrics: every process then has all
    rows.
    """
    return jax.tree.map(lambda x: constrain(x, " ".join("_" * x.ndim)), arrays)


def spread(x: jax.Array) -> jax.Array:
    """Shard axis 0 over all devices of the mesh, inside jit, and no other axis.

    This is for the same work on many small arrays: each device then does its own. Axis
    0 is padded with zeros to a multiple of the number of devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    missing = -len(x) % mesh.size
    x = jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1)))
    return _pin(x, P(mesh.axis_names))


def size_along(axis: str) -> int:
    """Return the number of parts of a logical axis of activations on this mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[a] for a in _split(axis, mesh))


def index_along(axis: str) -> jax.Array | int:
    """Return the index of this device's part of a logical axis, inside `per_device`."""
    axes = _split(axis, jax.sharding.get_abstract_mesh())
    return jax.lax.axis_index(axes) if axes else 0


def _split(axis: str, mesh: Any) -> tuple[str, ...]:
    return tuple(a for a in ACTIVATIONS.get(axis, ()) if mesh.shape.get(a, 1) > 1)


def per_device(
    function: Callable[..., jax.Array], inputs: Iterable[str], output: str
) -> Callable[..., jax.Array]:
    """Wrap a function to run on each device's part of its arguments (jax.shard_map).

    This is for kernels, which the compiler cannot partition. inputs, output: logical
    axes of the arguments and of the result ("batch length heads").
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
