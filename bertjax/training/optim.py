# SPDX-License-Identifier: Apache-2.0
"""Optimizers: directions by name, and what all of them share."""

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
    """Make Adam's direction, m / (sqrt(v) + eps), corrected for the bias or not.

    Without: google-research/bert, optimization.py (AdamWeightDecayOptimizer).
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
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101): decay x learning rate."""
    adam = scale_by_adam(b1, b2, eps, bias_correction)
    return [adam, layerwise.add_decay(wd, cautious_decay)]


def lamb(**settings: Any) -> Parts:
    """LAMB (You et al. 2020, arXiv 1904.00962, algorithm 2, bias corrected as there).

    settings: AdamW's. The decay is part of the update whose norm is taken.
    google-research/albert does not correct the bias, which a warm-up hides.
    """
    return [*adamw(**settings), layerwise.scale_by_trust_ratio()]


def stableadamw(
    *, wd: float, cautious_decay: bool, b1: float, b2: float, eps: float
) -> Parts:
    """StableAdamW: AdamW, its update clipped as Adafactor's; needs no optim.clip."""
    return [layerwise.scale_by_stable_adam(b1, b2, eps, wd, cautious_decay)]


def adafactor(*, wd: float, cautious_decay: bool) -> Parts:
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235), without first moment.

    Squared gradients are kept as row and column means where both sides of a matrix are
    at least 128; the update is clipped to RMS 1 and scaled by max(1e-3, RMS of the
    parameter) (algorithm 4, the rate given instead of relative to the step), so
    optim.lr is relative: 1e-2 rather than 1e-4.
    """
    parts = (optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    scaled = (*parts, optax.scale_by_param_block_rms())
    decay = layerwise.add_decay(wd, cautious_decay)
    return [layerwise.per_matrix(optax.chain(*scaled)), decay]


# By OPTIMIZERS' names. Steps go against the sum of the parts' work.
MAKERS = {
    make.__name__: make
    for make in (adamw, lamb, stableadamw, adafactor, muon, normuon, adamuon)
}


def clip_by_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """Scale gradients whose global norm exceeds `limit` to it.

    As optax.clip_by_global_norm, but the norm may be given (`norm`, f32 []).
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
    """Scale by minus the learning rate at `at`, by default the updates made so far.

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
    """Leave weights that are 0 as they are, so that what is pruned stays pruned.

    patterns: regular expressions of whole paths of parameters. What precedes this
    transform sees all weights; of optimizers that look at each weight by itself (AdamW)
    the others move as if the zeros were not there, but for the clipped norm.
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
    """Let a transform from outside refuse to make updates of other shapes than it got:
    added to the parameters, each of them would be spread over all of its axes."""
    part = optax.with_extra_args_support(part)

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

    return optax.GradientTransformationExtraArgs(part.init, update)


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

    name: one of MAKERS, or "my_lab.lion:b3=0.9", a module whose `make_optimizer` takes
    those of the settings that it reads and options of its own, and returns an optax
    transform (or a list of them). What that makes of gradients is subtracted, times
    the learning rate. settings: wd, b1, b2, eps (cautious_decay: layerwise.with_decay;
    ns_dtype: muon.scale_by_muon). zeros: patterns of `keep_zeros`. The update takes
    `at`, the time of the schedule.
    Raises UserError for a module or options that there are not.
    """
    switches = {"bias_correction": bias_correction, "cautious_decay": cautious_decay}
    settings |= switches | {"ns_dtype": ns_dtype}
    parts: Parts | optax.GradientTransformation
    if registry.is_outside(name):
        key, maker = "optim.name", "make_optimizer"
        module, options = registry.load_outside(key, name, maker)
        parts = registry.make(key, module, maker, options, **settings)
        parts = parts if isinstance(parts, list) else [parts]
        parts = [with_same_shapes(part, module.__name__) for part in parts]
    else:
        parts = MAKERS[name](**{key: settings[key] for key in OPTIMIZERS[name]})
    parts = parts if isinstance(parts, list) else [parts]
    kept = [keep_zeros(zeros)] if zeros else []
    tx = optax.chain(*parts, scale_by_rate(schedule, layer_decay, rates), *kept)
    return optax.chain(clip_by_norm(clip), tx) if clip > 0 else tx
