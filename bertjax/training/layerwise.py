# SPDX-License-Identifier: Apache-2.0
"""Parts of optimizers that treat layers separately.

Layers are axis 0 of the leaves below "layers". A shared layer (ALBERT) has one entry
there and counts as one layer.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bertjax.parallel.sharding import Path, is_matrix, is_stacked, keys


def decay_mask(params: Any) -> Any:
    """Return which leaves decay: only matrices, no biases and no norm scales."""
    return jax.tree_util.tree_map_with_path(is_matrix, params)


def with_decay(update: Any, param: Any, wd: float, cautious: bool) -> Any:
    """Return update + wd x param, which an optimizer subtracts.

    cautious: decay only elements whose update and parameter have the same sign or of
    which one is 0, so that the decay never works against the update (Chen et al. 2025,
    arXiv 2510.12402, algorithm 1).
    """
    if cautious:
        agree = jnp.sign(update) * jnp.sign(param) >= 0
        param = jnp.where(agree, param, 0.0)
    return update + wd * param


def add_decay(wd: float, cautious: bool) -> optax.GradientTransformation:
    """Add the decay (`with_decay`) to the updates of the leaves in `decay_mask`."""
    if not cautious:
        return optax.add_decayed_weights(wd, mask=decay_mask)

    def update(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda u, p: with_decay(u, p, wd, True), updates, params)

    # This is masked like optax's, so that the state, which holds nothing that is saved,
    # has the same structure.
    return optax.masked(optax.stateless(update), decay_mask)


def norm(path: Path, x: jax.Array, mean: bool = False) -> jax.Array:
    """Return each layer's norm, or root mean square, with dimensions kept."""
    axes = tuple(range(int(is_stacked(path)), x.ndim))
    reduce = jnp.mean if mean else jnp.sum
    return jnp.sqrt(reduce(jnp.square(x), axis=axes, keepdims=True))


def matrix_axes(path: Path, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a kernel's input axes and output axes, without the axis of layers.

    Kernels are [D, M]; queries, keys and values [D, H, K]; attention outputs [H, K, D]
    (bertjax/models). Stacked kernels have an axis of layers before these.
    """
    first = int(is_stacked(path))
    axes = tuple(range(first, ndim))
    many = len(axes) - 1 if "output" in keys(path) else 1
    return axes[:many], axes[many:]


def as_matrix(path: Path, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a kernel as a matrix: [in, out] or [layers, in, out]."""
    ins, outs = matrix_axes(path, len(shape))
    sizes = [int(np.prod([shape[a] for a in axes])) for axes in (ins, outs)]
    return (*shape[: int(is_stacked(path))], *sizes)


def group_of(path: Path, leaf: Any) -> str:
    """Return the group of a parameter for optim.rates, one of training.GROUPS.

    vectors: biases, norm scales and everything else that is not a matrix; kernels: the
    layers' matrices; embeddings: tables, and their projection; heads: all other
    matrices.
    """
    if not is_matrix(path, leaf):
        return "vectors"
    if is_stacked(path):
        return "kernels"
    tables = any(str(key).endswith("embeddings") for key in keys(path))
    return "embeddings" if tables else "heads"


def before(path: Path, name: str) -> tuple[Any, ...]:
    """Return the keys of a path before the first one of this name."""
    return tuple(keys(path)[: keys(path).index(name)])


def stack_depths(*parts: Any) -> dict[tuple[Any, ...], int]:
    """Return the number of layers of each stack, that of its deepest leaf.

    The result's keys are the stacks' paths before "layers". parts: trees among which a
    leaf's layers may be split (the trained and the frozen ones).
    """
    sizes: dict[tuple[Any, ...], int] = {}
    depths: dict[tuple[Any, ...], int] = {}
    for tree in parts:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if is_stacked(path):
                name, stack = tuple(keys(path)), before(path, "layers")
                sizes[name] = sizes.get(name, 0) + leaf.shape[0]
                depths[stack] = max(depths.get(stack, 0), sizes[name])
    return depths


def rate_multipliers(
    params: Any,
    decay: float,
    rates: Mapping[str, float] | None = None,
    frozen: Any = None,
) -> Any:
    """Return each leaf's factor of the learning rate: a number, or [n, 1, ...].

    It is the product of the factor of its group (`group_of`), by default 1, and that of
    its depth. Of N stacked layers, layer l (from 0) has decay^(N - l), the embeddings
    below them have decay^(N + 1), and all else (pooler, final norm, heads) has 1 (Clark
    et al. 2020, arXiv 2003.10555, appendix B; their code multiplies the whole encoder
    once more, so that the last layer has decay^2). A leaf that the first layers lack is
    aligned with the last layer. frozen: the layers that are not trained (State), which
    count too.
    """
    depths = stack_depths(params, frozen)

    def at_depth(path: Path, leaf: Any) -> Any:
        if is_stacked(path) and decay != 1:
            size = leaf.shape[0]
            factors = decay ** np.arange(size, 0, -1, dtype=np.float32)
            return factors.reshape(size, *[1] * (leaf.ndim - 1))
        if "embeddings" in keys(path):
            return decay ** (depths.get(before(path, "embeddings"), 0) + 1)
        return 1.0

    def one(path: Path, leaf: Any) -> Any:
        return (rates or {}).get(group_of(path, leaf), 1.0) * at_depth(path, leaf)

    return jax.tree_util.tree_map_with_path(one, params)


def scale_by_trust_ratio() -> optax.GradientTransformation:
    """Scale each layer's update to the norm of its parameters (LAMB's phi is identity).

    A layer is a leaf that decays (`decay_mask`), or an entry on axis 0 of such a leaf
    if it is stacked; the other leaves keep their updates, as in google-research/albert,
    lamb_optimizer.py. If a norm is 0, the ratio is 1.
    """

    def one(path: Path, update: Any, param: Any, decayed: bool) -> Any:
        if not decayed:
            return update
        size, step = norm(path, param), norm(path, update)
        usable = (size > 0) & (step > 0)
        return update * jnp.where(usable, size / jnp.where(usable, step, 1.0), 1.0)

    def update(updates: Any, params: Any) -> Any:
        decayed = decay_mask(params)
        return jax.tree_util.tree_map_with_path(one, updates, params, decayed)

    return optax.stateless(update)


def scale_by_stable_adam(
    b1: float, b2: float, eps: float, wd: float, cautious: bool = False
) -> optax.GradientTransformation:
    """Compute StableAdamW's step (Wortsman et al. 2023, arXiv 2304.13013, algorithm 2).

    It is Adam's direction plus the decay, divided by max(1, RMS) per tensor and layer.
    RMS^2 is the mean of g^2 / max(v, eps^2): the ratio of the squared gradient to its
    bias-corrected running mean v (Adafactor's update clipping).
    """
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        directions, state = adam.update(grads, state, params)
        corrected = optax.tree.bias_correction(state.nu, b2, state.count)

        def one(path: Path, u: Any, g: Any, v: Any, p: Any, decayed: bool) -> Any:
            least = max(eps**2, 1e-30)  # eps**2 could be 0 in float32
            over = norm(path, g * jax.lax.rsqrt(jnp.maximum(v, least)), mean=True)
            u = with_decay(u, p, wd, cautious) if decayed else u
            return u / jnp.maximum(over, 1.0)

        updates = jax.tree_util.tree_map_with_path(
            one, directions, grads, corrected, params, decay_mask(params)
        )
        return updates, state

    return optax.GradientTransformation(adam.init, update)


class PerMatrix(NamedTuple):
    """State of `per_matrix`: the inner transform's state for each leaf."""

    inner: Any


def per_matrix(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply a transform to each matrix separately: each layer's kernels as [in, out].

    Leaves that are no matrices keep their shape and are transformed layer by layer.
    """

    def flat(path: Path, x: Any) -> Any:
        return x.reshape(as_matrix(path, x.shape)) if is_matrix(path, x) else x

    def init(params: Any) -> PerMatrix:
        def one(path: Path, p: Any) -> Any:
            start = jax.vmap(tx.init) if is_stacked(path) else tx.init
            return start(flat(path, p))

        return PerMatrix(jax.tree_util.tree_map_with_path(one, params))

    def update(updates: Any, state: PerMatrix, params: Any) -> tuple[Any, PerMatrix]:
        def one(path: Path, u: Any, p: Any, s: Any) -> Any:
            run = jax.vmap(tx.update) if is_stacked(path) else tx.update
            result, s = run(flat(path, u), s, flat(path, p))
            return result.reshape(u.shape), s

        pairs = jax.tree_util.tree_map_with_path(one, updates, params, state.inner)
        tree = jax.tree.structure(updates)
        results, states = zip(*tree.flatten_up_to(pairs), strict=True)
        return tree.unflatten(results), PerMatrix(tree.unflatten(states))

    return optax.GradientTransformation(init, update)
