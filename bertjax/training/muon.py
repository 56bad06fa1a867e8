# SPDX-License-Identifier: Apache-2.0
"""Muon and what was built on it: orthogonal updates of the layers' kernels."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from bertjax.parallel.sharding import spread
from bertjax.training import layerwise
from bertjax.training.layerwise import Path

Parts = list[optax.GradientTransformation]

MUON_RMS = 0.2  # of an update, as AdamW's are (Liu et al. 2025, arXiv 2502.16982, 2.2)
MOMENTUM = 0.95  # of all three, with Nesterov's step ahead
SECOND = 0.95  # decay of the second moments of NorMuon and AdaMuon
EPS = 1e-8  # beside their roots
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
    """Use a direction for the layers' kernels and Adam's elsewhere, with decay."""

    def labels(params: Any) -> Any:
        def one(path: Path, leaf: Any) -> str:
            named = layerwise.is_stacked(path) and path[-1].key == "kernel"
            return "muon" if named and layerwise.is_matrix(path, leaf) else "adam"

        return jax.tree_util.tree_map_with_path(one, params)

    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
    split = optax.partition({"muon": direction, "adam": adam}, labels)
    return [split, layerwise.add_decay(wd, cautious_decay)]


def muon(ns_dtype: str = "float32", **settings: Any) -> Parts:
    """Muon (Jordan 2024) for the layers' kernels, each of each layer; AdamW elsewhere.

    The momentum (0.95, Nesterov) is made orthogonal by 5 Newton-Schulz iterations and
    scaled to AdamW's size, so that learning rate and decay are AdamW's. ns_dtype:
    scale_by_muon's; settings: on_kernels', b1, b2 and eps being of the embeddings,
    heads, biases and norms.
    """

    def resize(updates: Any, params: Any = None) -> Any:
        def one(path: Path, x: Any) -> Any:
            sides = layerwise.as_matrix(path, x.shape)[-2:]
            return x * (MUON_RMS * max(sides) ** 0.5)

        return jax.tree_util.tree_map_with_path(one, updates)

    orthogonal = optax.chain(scale_by_muon(ns_dtype), optax.stateless(resize))
    return on_kernels(orthogonal, **settings)


def normuon(ns_dtype: str = "float32", **settings: Any) -> Parts:
    """NorMuon (Li et al. 2025, arXiv 2510.05491, algorithm 1): `muon` whose orthogonal
    matrix is divided, output by output, by the root of its running mean square.

    The momentum is our Muon's (Nesterov, as in the authors' normuon.py); each kernel's
    update then has an RMS of MUON_RMS. ns_dtype, settings: as of `muon`.
    """
    second = scale_by_second_moment(by_output=True)
    return on_kernels(optax.chain(scale_by_muon(ns_dtype), second), **settings)


def adamuon(ns_dtype: str = "float32", **settings: Any) -> Parts:
    """AdaMuon (Si et al. 2025, arXiv 2507.11005, algorithm 1): `muon` of the signs of
    the momentum, each element divided by the root of its running mean square.

    The momentum is Nesterov's, as in the authors' adamuon.py; each kernel's update then
    has an RMS of MUON_RMS. ns_dtype, settings: as of `muon`.
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
    """Make optax's orthogonal momentum, of each kernel of each layer as a matrix.

    ns_dtype: of the Newton-Schulz iterations. bfloat16 is what Jordan 2024 uses; TPUs
    round the factors of f32 products to it as well. The state is optax's.
    """
    numbers = optax.contrib.MuonDimensionNumbers

    def dimensions(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: numbers(*layerwise.matrix_axes(path, x.ndim)), tree
        )

    # Momentum alone: without an iteration "aol" leaves it as it is.
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
    """Make each kernel of each layer orthogonal, nearly; see `newton_schulz`.

    Each device has whole matrices of its own. Parted, as kernels are kept, each of the
    five iterations would gather them anew.
    """

    def one(path: Path, x: Any) -> Any:
        matrices = x.reshape(-1, *layerwise.as_matrix(path, x.shape)[-2:])
        turned = jax.vmap(lambda m: newton_schulz(m, ns_dtype))(spread(matrices))
        return turned[: len(matrices)].reshape(x.shape)

    return jax.tree_util.tree_map_with_path(one, updates)


def newton_schulz(x: jax.Array, dtype: str) -> jax.Array:
    """Turn a matrix [in, out] into a nearly orthogonal one, f32.

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
    """State of `scale_by_second_moment`: running means of squares, f32, by kernel."""

    nu: Any


def scale_by_second_moment(by_output: bool) -> optax.GradientTransformation:
    """Divide kernels by the root of the running mean of their squares, and scale each
    of each layer to an RMS of MUON_RMS.

    by_output: the squares are means over what goes into an output (NorMuon's neurons),
    else element by element. The mean begins at 0 without a correction, which the
    scaling would take out again.
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
            return x * (MUON_RMS / jnp.maximum(size, EPS))  # 0 of a gradient of 0

        scaled = jax.tree_util.tree_map_with_path(one, updates, nu)
        return scaled, SecondMoment(nu)

    return optax.GradientTransformation(init, update)
