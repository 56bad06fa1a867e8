# SPDX-License-Identifier: Apache-2.0
"""Optimizers by name, and the transforms that all of them share."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bertjax import UserError, registry
from bertjax.parallel.sharding import Path, leaves_of, path_name
from bertjax.training import OPTIMIZERS, layerwise
from bertjax.training.muon import Parts, adamuon, muon, normuon
from bertjax.training.schedules import Schedule


def scale_by_adam(
    b1: float, b2: float, eps: float, bias_correction: bool
) -> optax.GradientTransformation:
    """Build Adam's direction, m / (sqrt(v) + eps), with or without bias correction.

    google-research/bert has none (optimization.py, AdamWeightDecayOptimizer).
    """
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
    if bias_correction:
        return adam

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        _, state = adam.update(grads, state, params)
        raw = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), state.mu, state.nu)
        return raw, state

    return optax.GradientTransformation(adam.init, update)


def adamw(
    *,
    wd: float,
    cautious_decay: bool,
    b1: float,
    b2: float,
    eps: float,
    bias_correction: bool,
) -> Parts:
    """Build AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101).

    The decay is multiplied by the learning rate.
    """
    adam = scale_by_adam(b1, b2, eps, bias_correction)
    return [adam, layerwise.add_decay(wd, cautious_decay)]


def lamb(**settings: Any) -> Parts:
    """Build LAMB (You et al. 2020, arXiv 1904.00962, algorithm 2).

    settings: AdamW's. The bias is corrected as in the paper; google-research/albert
    does not correct it, which a warm-up hides. The norm of the update includes the
    decay.
    """
    return [*adamw(**settings), layerwise.scale_by_trust_ratio()]


def stableadamw(
    *, wd: float, cautious_decay: bool, b1: float, b2: float, eps: float
) -> Parts:
    """Build StableAdamW: AdamW with Adafactor's update clipping (no optim.clip)."""
    return [layerwise.scale_by_stable_adam(b1, b2, eps, wd, cautious_decay)]


def adafactor(*, wd: float, cautious_decay: bool) -> Parts:
    """Build Adafactor (Shazeer and Stern 2018, arXiv 1804.04235), no first moment.

    Squared gradients are stored as row and column means if both sides of a matrix are
    at least 128. The update is clipped to RMS 1 and scaled by max(1e-3, RMS of the
    parameter), as in algorithm 4 but with the configured learning rate. So optim.lr is
    relative to the parameters: 1e-2 rather than 1e-4.
    """
    parts = (optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    scaled = (*parts, optax.scale_by_param_block_rms())
    decay = layerwise.add_decay(wd, cautious_decay)
    return [layerwise.per_matrix(optax.chain(*scaled)), decay]


# The functions that build the optimizers of OPTIMIZERS, by name. A step subtracts what
# the chain of their parts returns.
MAKERS = {
    make.__name__: make
    for make in (adamw, lamb, stableadamw, adafactor, muon, normuon, adamuon)
}


def clip_by_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """Scale gradients to a global norm of at most `limit`.

    Like optax.clip_by_global_norm, but the caller may pass the norm (`norm`, f32 []).
    """

    def update(
        grads: Any, state: Any, params: Any = None, *, norm: Any = None, **_: Any
    ) -> tuple[Any, Any]:
        norm = optax.tree.norm(grads) if norm is None else norm
        scale = limit / jnp.maximum(norm, limit)
        return jax.tree.map(lambda g: scale * g, grads), state

    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )


def scale_by_rate(
    schedule: Schedule,
    layer_decay: float = 1.0,
    rates: Mapping[str, float] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Multiply by minus the learning rate at `at`, by default the number of updates.

    layer_decay, rates: see layerwise.rate_multipliers.
    """

    def init(params: Any) -> optax.ScaleByScheduleState:
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        at: Any = None,
        frozen: Any = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        rate = -schedule(state.count if at is None else at)
        scaled = jax.tree.map(lambda u: rate * u, updates)
        if layer_decay != 1 or rates:
            factors = layerwise.rate_multipliers(updates, layer_decay, rates, frozen)
            scaled = jax.tree.map(jnp.multiply, scaled, factors)
        count = optax.safe_increment(state.count)
        return scaled, optax.ScaleByScheduleState(count)

    return optax.GradientTransformationExtraArgs(init, update)


def keep_zeros(patterns: Sequence[str]) -> optax.GradientTransformation:
    """Do not update weights that are 0, so that pruned weights stay pruned.

    patterns: regular expressions of whole paths of parameters. The transforms before
    this one include all weights. With an optimizer that treats each weight separately
    (AdamW) the other weights move as if the zeros did not exist, except for the norm by
    which gradients are clipped.
    """

    def one(path: Path, update: Any, param: Any) -> Any:
        name = path_name(path)
        if not any(re.fullmatch(pattern, name) for pattern in patterns):
            return update
        return jnp.where(param == 0, jnp.zeros_like(update), update)

    def update(updates: Any, params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(one, updates, params)

    return optax.stateless(update)


def with_same_shapes(
    part: optax.GradientTransformation, name: str
) -> optax.GradientTransformationExtraArgs:
    """Make a transform from outside raise UserError for updates of the wrong shape.

    Otherwise such an update would be broadcast when it is added to the parameters.
    It also raises one for a state that holds anything but arrays and numbers.
    """
    part = optax.with_extra_args_support(part)

    def init(params: Any) -> Any:
        state = part.init(params)
        for path, leaf in leaves_of(state).items():
            try:
                jax.typeof(leaf)
            except TypeError:
                raise UserError(
                    f"optim.name: {name}: init() makes a state whose {path or 'value'} "
                    f"is of type {type(leaf).__name__}: it has to be of arrays and "
                    "numbers"
                ) from None
        return state

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        result, state = part.update(updates, state, params, **extra)
        has, needs = (
            {path: jnp.shape(leaf) for path, leaf in leaves_of(tree).items()}
            for tree in (result, updates)
        )
        for path in needs:
            if has.get(path, needs[path]) != needs[path]:
                raise UserError(
                    f"optim.name: {name}: its update of {path} has the shape "
                    f"{has[path]}, the gradient {needs[path]}"
                )
        return result, state

    return optax.GradientTransformationExtraArgs(init, update)


def make_optimizer(
    name: str,
    schedule: Schedule,
    *,
    clip: float,
    layer_decay: float = 1.0,
    rates: Mapping[str, float] | None = None,
    bias_correction: bool = True,
    cautious_decay: bool = False,
    ns_dtype: str = "float32",
    zeros: Sequence[str] = (),
    **settings: float,
) -> optax.GradientTransformationExtraArgs:
    """Chain clipping by global norm (`clip` > 0), the optimizer `name`, and the rate.

    name: one of MAKERS, or a module such as "my_lab.lion:b3=0.9". The module's
    `make_optimizer` accepts the settings that it needs, and its own options. It returns
    an optax transform (or a list of them), whose result is multiplied by the learning
    rate and subtracted. settings: wd, b1, b2, eps (cautious_decay:
    layerwise.with_decay; ns_dtype: muon.scale_by_muon). zeros: patterns of
    `keep_zeros`. The update accepts `at`, the time of the schedule.
    Raises UserError for an unknown module or option.
    """
    switches = {"bias_correction": bias_correction, "cautious_decay": cautious_decay}
    settings |= switches | {"ns_dtype": ns_dtype}
    if registry.is_outside(name):
        key, maker = "optim.name", "make_optimizer"
        module, options = registry.load_outside(key, name, maker)
        found = registry.make(key, module, maker, options, **settings)
        found = found if isinstance(found, list) else [found]
        parts: Parts = [with_same_shapes(part, module.__name__) for part in found]
    else:
        parts = MAKERS[name](**{key: settings[key] for key in OPTIMIZERS[name]})
    kept = [keep_zeros(zeros)] if zeros else []
    tx = optax.chain(*parts, scale_by_rate(schedule, layer_decay, rates), *kept)
    return optax.chain(clip_by_norm(clip), tx) if clip > 0 else tx
