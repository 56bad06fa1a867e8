# SPDX-License-Identifier: Apache-2.0
"""Parts of a model that a run does not train (optim.freeze).

The parameters of such a run are in two trees with the same paths: `State.params`, which
has gradients and moments, and `State.frozen`. A leaf whose first layers or rows are
frozen is split on axis 0 between the two.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax import UserError
from bertjax.parallel.sharding import is_stacked, path_name
from bertjax.training import FreezeRule
from bertjax.training.layerwise import before, stack_depths

# Path of a leaf -> how many of the first entries of its axis 0 are frozen; None: all.
Sizes = Mapping[str, int | None]


def frozen_sizes(params: Any, rules: Sequence[FreezeRule]) -> dict[str, int | None]:
    """Return how much of each parameter is frozen; params: arrays or shapes.

    Layers are counted from the embeddings up, the same way for all leaves: of a leaf
    that the first layers lack (sharding.is_stacked) correspondingly fewer entries are
    frozen. Raises UserError for a rule that matches nothing, for a number larger than
    that of the layers or rows, and if nothing is left to train.
    """
    leaves = {
        path_name(path): (path, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    check_rules(leaves, rules)
    depths = stack_depths(params)
    sizes: dict[str, int | None] = {}
    for rule in rules:
        for name, (path, leaf) in leaves.items():
            if not re.fullmatch(rule.pattern, name):
                continue
            if rule.first is None:
                sizes[name] = None
                continue
            what, depth = "rows", len_of(leaf)
            if is_stacked(path):
                what, depth = "layers", depths[before(path, "layers")]
            if rule.first > depth:
                raise UserError(
                    f"optim.freeze: {rule.text} is the first {rule.first} {what} of "
                    f"{name}, which has {depth}"
                )
            n = rule.first - (depth - len_of(leaf))
            if n > 0 and sizes.get(name, 0) is not None:
                whole = n == len_of(leaf)
                sizes[name] = None if whole else max(n, sizes.get(name) or 0)
    if sizes and all(sizes.get(name, 0) is None for name in leaves):
        raise UserError(
            f"optim.freeze={','.join(r.text for r in rules)} freezes every parameter: "
            "nothing is left to train"
        )
    return sizes


def check_rules(
    paths: Sequence[str] | Mapping[str, Any], rules: Any, key: str = "optim.freeze"
) -> None:
    """Raise UserError for a rule that matches none of the paths."""
    for rule in rules:
        if not any(re.fullmatch(rule.pattern, path) for path in paths):
            few = ", ".join([*paths][:3])
            raise UserError(
                f"{key}: {rule.text} matches no parameter; their paths are "
                f"{few}, ... (--dry_run lists them)"
            )


def len_of(leaf: Any) -> int:
    """Return the size of axis 0 of an array or a shape; 1 for a scalar."""
    return leaf.shape[0] if leaf.shape else 1


def split(
    params: Mapping[str, Any], sizes: Sizes, prefix: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a tree of parameters, or of some of them, into (trained, frozen)."""
    trained: dict[str, Any] = {}
    frozen: dict[str, Any] = {}
    for key, value in params.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            mine, kept = split(value, sizes, f"{path}/")
            if mine or not kept:
                trained[key] = mine
            if kept:
                frozen[key] = kept
        elif path not in sizes:
            trained[key] = value
        elif (n := sizes[path]) is None:
            frozen[key] = value
        else:
            trained[key], frozen[key] = value[n:], value[:n]
    return trained, frozen


def join(params: Mapping[str, Any], frozen: Mapping[str, Any] | None) -> dict[str, Any]:
    """Undo `split`, and add whatever else is frozen (a teacher).

    Leaves are numpy or jax arrays; those in only one of the trees are returned
    unchanged.
    """
    joined = {**params}
    for key, value in (frozen or {}).items():
        if key not in params:
            joined[key] = value
        elif isinstance(value, Mapping):
            joined[key] = join(params[key], value)
        else:
            both = value, params[key]
            is_numpy = all(isinstance(x, np.ndarray) for x in both)
            joined[key] = (np if is_numpy else jnp).concatenate(both)
    return joined
