# SPDX-License-Identifier: Apache-2.0
"""Probes: small classifiers on features that stay as they are.

All probes of a kind (depths, labels, seeds) are trained side by side by vmap, in one
program; the amounts of training rows go through the same program one after the other.
All see the same batch at a time, so that features meet the kernels of all seeds and
labellings in one product.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

HIDDEN = 128  # units of the MLP's hidden layer
BLOCK = 1024  # rows that are scored at a time


class Settings(NamedTuple):
    """Adam for `steps` updates, its rate falling from lr to 0. weight_decay: one over
    the variance that logits have a priori."""

    steps: int
    batch_size: int
    lr: float
    weight_decay: float


class Result(NamedTuple):
    """What `run` returns; before the axes named are those of `run`.

    bits: of the training rows [begin, end) under a probe of those before, f32 [].
    fitted: share of the rows before `begin` whose label it gives, f32 []. predicted:
    classes of the other rows, i32 [m]. params: the probe's own.
    """

    bits: jax.Array
    fitted: jax.Array
    predicted: jax.Array
    params: Any


def init_linear(key: jax.Array, width: int, classes: int) -> Any:
    """Make one layer, f32 kernel [D, C] and bias [C], all zeros."""
    return {"out": {"kernel": jnp.zeros((width, classes)), "bias": jnp.zeros(classes)}}


def init_mlp(key: jax.Array, width: int, classes: int) -> Any:
    """Make two layers, the first one's kernel normal with variance 1 / D."""
    kernel = jax.random.normal(key, (width, HIDDEN)) / math.sqrt(width)
    hidden = {"kernel": kernel, "bias": jnp.zeros(HIDDEN)}
    return {"in": hidden, **init_linear(key, HIDDEN, classes)}


# A probe is how it begins: init(key, D, C) -> params. Of those that draw nothing by the
# key all seeds train the same.
PROBES = {"linear": init_linear, "mlp": init_mlp}
DRAWN = {"mlp"}


def take_rows(data: Any, begin: jax.Array, size: int) -> Any:
    """Take rows that lie together of features [..., n, D]: a gather is far slower.

    data: the features, or, of a mix, those of all depths [depths, n, D] and which
    depths it sees, bool [depths].
    """
    if isinstance(data, tuple):
        return take_rows(data[0], begin, size), data[1]
    return jax.lax.dynamic_slice_in_dim(data, begin, size, axis=-2)


def logits(params: Any, x: Any) -> jax.Array:
    """Return the logits f32 [b, C] of rows [b, D], or of a mix of depths.

    A scalar mix before a probe (as in Tenney, Das and Pavlick 2019) learns the weights
    softmax(a) of the depths, beginning at equal ones, and their scale gamma.
    """
    if "mix" in params:
        weights = mix_weights(params["mix"], x[1])
        x = params["scale"] * jnp.einsum("l,lbd->bd", weights, x[0])
    if "in" in params:
        x = jax.nn.relu(x @ params["in"]["kernel"] + params["in"]["bias"])
    return x @ params["out"]["kernel"] + params["out"]["bias"]


def mix_weights(mix: jax.Array, sees: jax.Array) -> jax.Array:
    """Return s = softmax(a) over the depths that are seen, f32 [depths]."""
    return jax.nn.softmax(jnp.where(sees, mix, -jnp.inf))


def log_frequencies(labels: jax.Array, count: jax.Array, classes: int) -> jax.Array:
    """Return ln of how often each class is among the first `count` labels, each counted
    once more: f32 [C].

    >>> shares = jnp.exp(log_frequencies(jnp.array([1, 1, 0, 2]), jnp.int32(2), 3))
    >>> [round(float(share), 3) for share in shares]
    [0.2, 0.6, 0.2]
    """
    known = (jnp.arange(len(labels)) < count).astype(jnp.float32)
    seen = jnp.zeros(classes).at[labels].add(known)
    return jnp.log((seen + 1) / (count + classes))


def penalty(params: Any, middle: jax.Array) -> jax.Array:
    """Return minus the log density of kernels and biases, a constant aside.

    Kernel entries are normal with variance 1 / inputs, biases with 1, so that logits
    of standardised features have a variance of about 1. The biases of the classes vary
    about `middle`, f32 [C], all others about 0.
    """
    layers = {name: p for name, p in params.items() if isinstance(p, dict)}
    biases = {name: p["bias"] for name, p in layers.items()}
    biases["out"] -= middle
    kernels = sum(len(p["kernel"]) * jnp.sum(p["kernel"] ** 2) for p in layers.values())
    return 0.5 * (kernels + sum(jnp.sum(bias**2) for bias in biases.values()))


def fit(
    start: Any,
    data: Any,
    labels: jax.Array,
    count: jax.Array,
    key: jax.Array,
    settings: Settings,
) -> Any:
    """Train a probe on the first `count` rows and return its parameters.

    start: its first parameters. labels: i32 [n]; rows are in random order. Minimises
    the mean cross-entropy plus weight_decay * penalty / count: the most probable
    parameters a posteriori, so that a probe of few rows is not sure of itself.

    Biases begin at the frequencies of the classes, and vary about them: features have
    mean 0, so that nothing else tells these, and where one class is most rows, as O
    among tags, `steps` updates of `lr` from 0 are too short a way.
    """
    out = start["out"]
    middle = log_frequencies(labels, count, len(out["bias"]))
    start = {**start, "out": {**out, "bias": out["bias"] + middle}}
    tx = optax.adam(optax.linear_schedule(settings.lr, 0.0, settings.steps))
    size = min(settings.batch_size, len(labels))
    parts = -(-count // size)

    def loss(params: Any, begin: jax.Array) -> jax.Array:
        gold = jax.lax.dynamic_slice_in_dim(labels, begin, size)
        values = logits(params, take_rows(data, begin, size))
        costs = optax.softmax_cross_entropy_with_integer_labels(values, gold)
        known = begin + jnp.arange(size) < count
        cost = jnp.where(known, costs, 0.0).sum() / known.sum()
        return cost + settings.weight_decay * penalty(params, middle) / count

    def update(carry: Any, step: jax.Array) -> tuple[Any, None]:
        params, state = carry
        part = jax.random.randint(jax.random.fold_in(key, step), (), 0, parts)
        begin = jnp.maximum(jnp.minimum(part * size, count - size), 0)
        changes, state = tx.update(jax.grad(loss)(params, begin), state)
        return (optax.apply_updates(params, changes), state), None

    first = start, tx.init(start)
    (params, _), _ = jax.lax.scan(update, first, jnp.arange(settings.steps))
    return params


def score(params: Any, data: Any, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return -ln p of the labels i32 [n], f32 [n], and the likeliest classes i32 [n].

    A block of rows at a time: the logits of all probes at once could take more memory
    than the features.
    """
    n = len(labels)
    size = min(n, BLOCK)
    begins = np.minimum(np.arange(0, n, size), n - size)

    def block(begin: jax.Array) -> tuple[jax.Array, jax.Array]:
        values = logits(params, take_rows(data, begin, size))
        gold = jax.lax.dynamic_slice_in_dim(labels, begin, size)
        costs = optax.softmax_cross_entropy_with_integer_labels(values, gold)
        return costs, values.argmax(-1).astype(jnp.int32)

    rows = np.arange(n)
    at = rows // size, rows - begins[rows // size]
    costs, classes = jax.lax.map(block, begins)
    return costs[at], classes[at]


@functools.partial(
    jax.jit, static_argnames=("init", "classes", "axes", "seeds", "settings")
)
def run(
    init: Callable[[jax.Array, int, int], Any],
    classes: int,
    axes: Any,
    train: Any,
    valid: Any,
    labels: jax.Array,
    counts: jax.Array,
    seeds: int,
    key: jax.Array,
    settings: Settings,
) -> Result:
    """Train and score probes for every amount of rows, seed, labelling and depth.

    init: of PROBES. train, valid: as `take_rows` has data, of depth i along `axes` (as
    vmap has them).
    labels: i32 [seeds, labellings, n] of the training rows. counts: i32 [amounts, 2],
    how many rows a probe learns and the end of those that its bits are of.
    Returns a Result with leading axes [amounts, seeds, labellings, depths].
    """
    features = jax.tree.leaves(train)[0], jax.tree.leaves(valid)[0]
    (n, width), m = features[0].shape[-2:], features[1].shape[-2]

    def one(train: Any, valid: Any, labels: Any, key: Any, counts: Any) -> Result:
        begin, end = counts
        start = init(key, width, classes)
        if isinstance(train, tuple):
            start |= {"mix": jnp.zeros(len(train[1])), "scale": jnp.ones(())}
        params = fit(start, train, labels, begin, draws, settings)
        costs, guessed = score(params, train, labels)
        at = jnp.arange(n)
        coded = (at >= begin) & (at < end)
        right = (guessed == labels) & (at < begin)
        return Result(
            jnp.where(coded, costs, 0.0).sum() / math.log(2),
            right.sum() / begin,
            score(params, valid, jnp.zeros(m, jnp.int32))[1],
            params,
        )

    draws, *keys = jax.random.split(key, seeds + 1)
    each = jax.vmap(one, (axes, axes, None, None, None))
    each = jax.vmap(each, (None, None, 0, None, None))
    each = jax.vmap(each, (None, None, 0, 0, None))
    return jax.lax.map(lambda c: each(train, valid, labels, jnp.stack(keys), c), counts)


def standardise(train: np.ndarray, valid: np.ndarray) -> None:
    """Give each number of each depth mean 0 and deviation 1 over `train`, in place.

    What hardly varies (the embedding of [CLS]) becomes 0, not noise blown up. Depths
    whose norms differ would mislead the weights of a mix.
    """
    for one, other in zip(train, valid, strict=True):  # copies are of a depth alone
        mean, deviation = one.mean(0, np.float64), one.std(0, np.float64)
        varies = deviation > 1e-4 * np.abs(one).mean(dtype=np.float64)
        scale = np.where(varies, 1 / np.maximum(deviation, 1e-30), 0.0)
        for x in (one, other):
            x -= mean.astype(np.float32)
            x *= scale.astype(np.float32)
