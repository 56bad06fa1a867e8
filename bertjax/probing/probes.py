# SPDX-License-Identifier: Apache-2.0
"""Probes: small classifiers on fixed features.

All probes of a kind (for all depths, labels and seeds) are trained in parallel by vmap,
in one program; the amounts of training rows run through this program one after the
other. All probes get the same batch at a time, so that one matrix product multiplies
features with the kernels of all seeds and labelings.
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
BLOCK = 1024  # rows scored at a time


class Settings(NamedTuple):
    """The training of a probe: Adam with a learning rate that falls from lr to 0.

    steps: the number of updates; weight_decay: one over the prior variance of logits.
    """

    steps: int
    batch_size: int
    lr: float
    weight_decay: float


class Result(NamedTuple):
    """The result of `run`, whose leading axes come before those listed here.

    bits: f32 [], of the training rows [begin, end) under a probe trained on the rows
    before. fitted: f32 [], the share of the rows before `begin` whose label the probe
    predicts. predicted: i32 [m], the predicted classes of the other rows. params: the
    probe's parameters.
    """

    bits: jax.Array
    fitted: jax.Array
    predicted: jax.Array
    params: Any


def init_linear(key: jax.Array, width: int, classes: int) -> Any:
    """Initialize one layer with zeros: f32 kernel [D, C] and bias [C]."""
    return {"out": {"kernel": jnp.zeros((width, classes)), "bias": jnp.zeros(classes)}}


def init_mlp(key: jax.Array, width: int, classes: int) -> Any:
    """Initialize two layers; the first one's kernel is normal with variance 1 / D."""
    kernel = jax.random.normal(key, (width, HIDDEN)) / math.sqrt(width)
    hidden = {"kernel": kernel, "bias": jnp.zeros(HIDDEN)}
    return {"in": hidden, **init_linear(key, HIDDEN, classes)}


# A probe is defined by its initialization: init(key, D, C) -> params. The probes in
# DRAWN depend on the key; for the others all seeds would be the same.
PROBES = {"linear": init_linear, "mlp": init_mlp}
DRAWN = {"mlp"}


def take_rows(data: Any, begin: jax.Array, size: int) -> Any:
    """Slice consecutive rows of features [..., n, D]; a gather would be far slower.

    data: the features; for a mix a pair of the features of all depths [depths, n, D],
    and which depths it mixes, bool [depths].
    """
    if isinstance(data, tuple):
        return take_rows(data[0], begin, size), data[1]
    return jax.lax.dynamic_slice_in_dim(data, begin, size, axis=-2)


def logits(params: Any, x: Any) -> jax.Array:
    """Return the logits f32 [b, C] for rows [b, D], or for a mix of depths.

    A scalar mix before a probe (as in Tenney, Das and Pavlick 2019) learns the weights
    softmax(a) of the depths, which are equal at first, and their scale gamma.
    """
    if "mix" in params:
        weights = mix_weights(params["mix"], x[1])
        x = params["scale"] * jnp.einsum("l,lbd->bd", weights, x[0])
    if "in" in params:
        x = jax.nn.relu(x @ params["in"]["kernel"] + params["in"]["bias"])
    return x @ params["out"]["kernel"] + params["out"]["bias"]


def mix_weights(mix: jax.Array, sees: jax.Array) -> jax.Array:
    """Return s = softmax(a) over the depths in `sees`, f32 [depths]."""
    return jax.nn.softmax(jnp.where(sees, mix, -jnp.inf))


def log_frequencies(labels: jax.Array, count: jax.Array, classes: int) -> jax.Array:
    """Return the log frequencies of the classes in the first `count` labels: f32 [C].

    Each class is counted once more than it occurs.

    >>> shares = jnp.exp(log_frequencies(jnp.array([1, 1, 0, 2]), jnp.int32(2), 3))
    >>> [round(float(share), 3) for share in shares]
    [0.2, 0.6, 0.2]
    """
    known = (jnp.arange(len(labels)) < count).astype(jnp.float32)
    seen = jnp.zeros(classes).at[labels].add(known)
    return jnp.log((seen + 1) / (count + classes))


def penalty(params: Any, middle: jax.Array) -> jax.Array:
    """Return the negative log prior of kernels and biases, up to a constant.

    Kernel entries are normal with variance 1 / inputs, biases with variance 1, so that
    logits of standardized features have a variance of about 1. The mean of the classes'
    biases is `middle`, f32 [C]; that of all others is 0.
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

    start: the initial parameters. labels: i32 [n]; rows are in random order. It
    minimizes the mean cross-entropy plus weight_decay * penalty / count. These are the
    maximum a posteriori parameters, so a probe of few rows is not overconfident.

    Biases begin at the log frequencies of the classes, which are also their prior mean.
    Features have mean 0, so only biases can express these frequencies, and if most rows
    have one class (O among tags), `steps` updates of `lr` cannot get there from 0.
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
    """Return -ln p of the labels i32 [n], f32 [n], and the predicted classes i32 [n].

    It works on one block of rows at a time, because the logits of all probes at once
    could take more memory than the features.
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
    """Train and score probes for every amount of rows, seed, labeling and depth.

    init: a value of PROBES. train, valid: data as in `take_rows`; vmap maps over the
    depths along `axes`. labels: i32 [seeds, labelings, n] of the training rows. counts:
    i32 [amounts, 2], the number of rows on which a probe is trained, and the end of the
    rows for its bits.
    Returns a Result with leading axes [amounts, seeds, labelings, depths].
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


def standardize(train: np.ndarray, valid: np.ndarray) -> None:
    """Standardize each feature of each depth to mean 0 and deviation 1, in place.

    Mean and deviation are those over `train`. Features that hardly vary (the embedding
    of [CLS]) become 0, so that noise is not amplified. Without standardization depths
    with different norms would distort the weights of a mix.
    """
    for one, other in zip(train, valid, strict=True):  # so that only a depth is copied
        mean, deviation = one.mean(0, np.float64), one.std(0, np.float64)
        varies = deviation > 1e-4 * np.abs(one).mean(dtype=np.float64)
        scale = np.where(varies, 1 / np.maximum(deviation, 1e-30), 0.0)
        for x in (one, other):
            x -= mean.astype(np.float32)
            x *= scale.astype(np.float32)
