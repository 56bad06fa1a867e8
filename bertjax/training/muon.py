# SPDX-License-Identifier: Apache-2.0
"""Muon and its variants: orthogonal updates of the layers' kernels."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bertjax.parallel.sharding import spread
from bertjax.training import layerwise
from bertjax.training.layerwise import Path

Parts = list[optax.GradientTransformation]

# The RMS of an update, like that of AdamW (Liu et al. 2025, arXiv 2502.16982, 2.2).
MUON_RMS = 0.2
MOMENTUM = 0.95  # Nesterov momentum, in all three optimizers
SECOND = 0.95  # decay of the second moments of NorMuon and AdaMuon
EPS = 1e-8  # added to norms and roots by which updates are divided
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan 2024; optax's


def on_kernels(
    direction: optax.GradientTransformation,
    *,
    wd: float,
    cautious_decay: bool,
    b1: float,
    b2: float,
    eps: float,
) -> Parts:
    """Use `direction` for the layers' kernels and Adam elsewhere, with weight decay."""

    def labels(params: Any) -> Any:
        def one(path: Path, leaf: Any) -> str:
            named = layerwise.is_stacked(path) and path[-1].key == "kernel"
            return "muon" if named and layerwise.is_matrix(path, leaf) else "adam"

        return jax.tree_util.tree_map_with_path(one, params)

    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
    split = optax.partition({"muon": direction, "adam": adam}, labels)
    return [split, layerwise.add_decay(wd, cautious_decay)]


def muon(ns_dtype: str = "float32", **settings: Any) -> Parts:
    """Build Muon (Jordan 2024) for each layer's kernels, with AdamW elsewhere.

    The momentum (0.95, Nesterov) is orthogonalized by 5 Newton-Schulz iterations and
    scaled to the size of AdamW's updates, so that AdamW's learning rate and decay
    apply. ns_dtype: see scale_by_muon. settings: see on_kernels; b1, b2 and eps are for
    the embeddings, heads, biases and norms.
    """

    def resize(updates: Any, params: Any = None) -> Any:
        def one(path: Path, x: Any) -> Any:
            sides = layerwise.as_matrix(path, x.shape)[-2:]
            return x * (MUON_RMS * max(sides) ** 0.5)

        return jax.tree_util.tree_map_with_path(one, updates)

    orthogonal = optax.chain(scale_by_muon(ns_dtype), optax.stateless(resize))
    return on_kernels(orthogonal, **settings)


def normuon(ns_dtype: str = "float32", **settings: Any) -> Parts:
    """Build NorMuon (Li et al. 2025, arXiv 2510.05491, algorithm 1).

    It is `muon` with the orthogonal matrix divided, output by output, by the root of
    its running mean square. The momentum is that of our Muon (Nesterov, as in the
    authors' normuon.py). Each kernel's update is then scaled to an RMS of MUON_RMS.
    ns_dtype, settings: as for `muon`.
    """
    second = scale_by_second_moment(by_output=True)
    return on_kernels(optax.chain(scale_by_muon(ns_dtype), second), **settings)


def adamuon(ns_dtype: str = "float32", **settings: Any) -> Parts:
    """Build AdaMuon (Si et al. 2025, arXiv 2507.11005, algorithm 1).

    It is `muon` of the signs of the momentum, with each element divided by the root of
    its running mean square. The momentum is Nesterov's, as in the authors' adamuon.py.
    Each kernel's update is then scaled to an RMS of MUON_RMS. ns_dtype, settings: as
    for `muon`.
    """

    def signs(updates: Any, params: Any = None) -> Any:
        return orthogonalize(jax.tree.map(jnp.sign, updates), ns_dtype)

    direction = optax.chain(
        optax.trace(MOMENTUM, nesterov=True),
        optax.stateless(signs),
        scale_by_second_moment(by_output=False),
    )
    return on_kernels(direction, **settings)


def scale_by_muon(ns_dtype: str = "float32") -> optax.GradientTransformation:
    """Build optax's scale_by_muon with our Newton-Schulz iterations, per layer.

    Each kernel of each layer is one matrix. ns_dtype: the dtype of the iterations.
    Jordan 2024 uses bfloat16, and TPUs round the factors of f32 products to it as well.
    The state is optax's.
    """
    numbers = optax.contrib.MuonDimensionNumbers

    def dimensions(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: numbers(*layerwise.matrix_axes(path, x.ndim)), tree
        )

    # This is only the momentum: without iterations "aol" does not change it.
    momentum = optax.contrib.scale_by_muon(
        beta=MOMENTUM,
        ns_steps=0,
        preconditioning="aol",
        weight_dimension_numbers=dimensions,
    )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = momentum.update(updates, state, params)
        return orthogonalize(updates, ns_dtype), state

    return optax.GradientTransformation(momentum.init, update)


def orthogonalize(updates: Any, ns_dtype: str) -> Any:
    """Make each kernel of each layer nearly orthogonal; see `newton_schulz`.

    Each device works on whole matrices of its own. If the matrices stayed sharded, as
    kernels are stored, each of the five iterations would gather them again.
    """

    def one(path: Path, x: Any) -> Any:
        matrices = x.reshape(-1, *layerwise.as_matrix(path, x.shape)[-2:])
        turned = jax.vmap(lambda m: newton_schulz(m, ns_dtype))(spread(matrices))
        return turned[: len(matrices)].reshape(x.shape)

    return jax.tree_util.tree_map_with_path(one, updates)


def newton_schulz(x: jax.Array, dtype: str) -> jax.Array:
    """Return the nearly orthogonal matrix f32 for a matrix [in, out].

    Five iterations of X -> a X + (b A + c A A) X with A = X X^T (Jordan 2024), products
    in `dtype`, in optax's order. Singular values end near 1, as U S' V^T with S' in
    about [0.7, 1.2].
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = (x / (jnp.linalg.norm(x) + EPS)).astype(dtype)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + (c * gram) @ gram) @ x
    x = x.astype(jnp.float32)
    return x.T if is_tall else x


class SecondMoment(NamedTuple):
    """State of `scale_by_second_moment`: f32 running means of squares, per kernel."""

    nu: Any


def scale_by_second_moment(by_output: bool) -> optax.GradientTransformation:
    """Divide kernels by the root of their running mean square, then scale them.

    Each kernel of each layer is scaled to an RMS of MUON_RMS. by_output: the squares
    are averaged over the inputs of each output (NorMuon's neurons); otherwise they are
    per element. The running mean begins at 0. It has no bias correction, because the
    scaling would cancel it.
    """

    def squares(path: Path, x: Any) -> Any:
        ins = layerwise.matrix_axes(path, x.ndim)[0] if by_output else ()
        return jnp.mean(jnp.square(x), axis=ins, keepdims=True)

    def init(params: Any) -> SecondMoment:
        def one(path: Path, p: Any) -> Any:
            return jnp.zeros_like(squares(path, p))

        return SecondMoment(jax.tree_util.tree_map_with_path(one, params))

    def update(
        updates: Any, state: SecondMoment, params: Any = None
    ) -> tuple[Any, SecondMoment]:
        found = jax.tree_util.tree_map_with_path(squares, updates)
        nu = optax.tree.update_moment(found, state.nu, SECOND, 1)

        def one(path: Path, x: Any, v: Any) -> Any:
            x = x / (jnp.sqrt(v) + EPS)
            size = layerwise.norm(path, x, mean=True)
            # A gradient of 0 gives an update of 0.
            return x * (MUON_RMS / jnp.maximum(size, EPS))

        scaled = jax.tree_util.tree_map_with_path(one, updates, nu)
        return scaled, SecondMoment(nu)

    return optax.GradientTransformation(init, update)
