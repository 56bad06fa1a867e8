# SPDX-License-Identifier: Apache-2.0
"""How arrays lie on the mesh: one table from paths to axes, one from axes to mesh.

The rows serve the optimizer's moments too, since their paths end like the
parameters' own.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bertjax import UserError

Rows = Iterable[tuple[str, str]]

# Path (regular expression, whole path) -> logical axes. A leaf matches exactly one.
ROWS: tuple[tuple[str, str], ...] = (
    (r"encoder/embeddings/word|mlm/decoder", "vocab embed"),
    (r"encoder/embeddings/(position|token_type)", "table embed"),
    (r"encoder/(embeddings/norm|final_norm)/(scale|bias)", "width"),
    (r"encoder/layers/attention/(query|key|value)/kernel", "layers embed heads head"),
    (r"encoder/layers/attention/(query|key|value)/bias", "layers heads head"),
    (r"encoder/layers/attention/output/kernel", "layers heads head embed"),
    (r"encoder/layers/attention/output/bias", "layers width"),
    (r"encoder/layers/mlp/(up|gate)/kernel", "layers embed mlp"),
    (r"encoder/layers/mlp/(up|gate)/bias", "layers mlp"),
    (r"encoder/layers/mlp/down/kernel", "layers mlp embed"),
    (r"encoder/layers/mlp/down/bias", "layers width"),
    (r"encoder/layers/(attention|mlp)/norm/(scale|bias)", "layers width"),
    (
        r"(encoder/embeddings/projection|encoder/pooler|(mlm|rtd)/transform)/kernel",
        "embed width",
    ),
    (
        r"(encoder/embeddings/projection|encoder/pooler|(mlm|rtd)/transform)/bias",
        "width",
    ),
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


def path_name(path: tuple[Any, ...]) -> str:
    """Write a pytree path as "encoder/embeddings/word"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def spec(axes: str, rules: Mapping[str, tuple[str, ...]] = RULES) -> P:
    """Turn logical axes ("layers embed mlp") into a PartitionSpec."""
    return P(*(rules.get(a) or None for a in axes.split()))


def axes_of(path: str, rows: Rows = ROWS) -> str:
    """Return the logical axes of a parameter by its path.

    Raises ValueError unless exactly one row matches: a renamed parameter must not
    become replicated in silence.
    """
    found = [axes for pattern, axes in rows if re.fullmatch(pattern, path)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows of the sharding table match {path!r}")
    return found[0]


def param_shardings(params: Any, mesh: Mesh, extra: Rows = ()) -> Any:
    """Give every leaf of a parameter tree (arrays or shapes) its NamedSharding.

    `extra` holds the rows of heads from outside the package. Raises UserError when a
    mesh axis does not divide an axis of a parameter.
    """
    rows = (*ROWS, *extra)

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = path_name(path)
        axes = axes_of(name, rows)
        if len(axes.split()) != leaf.ndim:
            raise ValueError(f"{name} has shape {leaf.shape}, its row says {axes!r}")
        for size, axis in zip(leaf.shape, axes.split(), strict=True):
            for split in RULES.get(axis, ()):
                if size % mesh.shape[split]:
                    raise UserError(
                        f"mesh.{split}={mesh.shape[split]} does not divide the "
                        f"{size} {axis} of {name}"
                    )
        return NamedSharding(mesh, spec(axes))

    return jax.tree_util.tree_map_with_path(one, params)


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

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
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
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, ACTIVATIONS))
