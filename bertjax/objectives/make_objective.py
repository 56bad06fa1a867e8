# SPDX-License-Identifier: Apache-2.0
"""Build the Objective that config.objective names."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bertjax import UserError, registry
from bertjax.models import attention
from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Params
from bertjax.objectives import SUPPORT, parse
from bertjax.objectives.base import NO_TOKENIZER, Head, Objective, TokenIds
from bertjax.objectives.combine import combine, mix_by_rows
from bertjax.objectives.teacher import Teacher
from bertjax.parallel.sharding import leaves_of

PACKAGE = "bertjax.objectives"


def make_objective(
    name: str,
    cfg: EncoderConfig,
    tokens: TokenIds = NO_TOKENIZER,
    teacher: Teacher | None = None,
    candidates: Any = None,
) -> tuple[Objective, EncoderConfig]:
    """Build an objective such as "mlm+nsp"; also return cfg adjusted to it.

    In the returned cfg, pooler and is_decoder are set as the objective needs them.
    tokens, teacher, candidates (of a task's rows): passed to modules whose make_head or
    make_objective has arguments of these names. Without a teacher, the losses that need
    one are left out.
    Raises UserError for an unknown name or option, and for parts that cannot be
    combined.
    """
    attention.import_backend(cfg.attention)
    offered = {"tokens": tokens, "teacher": teacher, "candidates": candidates}
    named = [part for part in parse(name) if part.rows != 0]
    parts = [
        (registry.load("objective", part.name, PACKAGE, SUPPORT), part.options)
        for part in named
    ]
    if whole := [part for part in parts if hasattr(part[0], "make_objective")]:
        module, options = whole[0]
        if len(parts) > 1:
            raise UserError(f"objective={name!r}: {module.__name__} stands alone")
        maker = module, "make_objective", options
        objective, cfg = registry.make("objective", *maker, cfg, **offered)
    else:
        heads = [
            registry.make("objective", module, "make_head", options, **offered)
            for module, options in parts
        ]
        if len({h.name for h in heads}) < len(heads):
            raise UserError(f"objective={name!r} names a head twice")
        cfg = dataclasses.replace(cfg, pooler=any(h.pooled for h in heads))
        rows = [part.rows for part in named] if len(named) > 1 else [None]
        check_causal(name, heads, cfg, mixed=rows[0] is not None)
        if all(head.causal for head in heads):
            cfg = dataclasses.replace(cfg, is_decoder=True)
        if rows[0] is None:
            objective = combine(heads, cfg)
        else:
            objective = mix_by_rows(heads, cfg, rows)
        for (module, _), head in zip(parts, heads, strict=True):
            if head.flops is None and not module.__name__.startswith(f"{PACKAGE}."):
                objective = dataclasses.replace(objective, flops=None)
    objective = dataclasses.replace(objective, init=with_floats(objective.init))
    if not objective.task_type:
        return objective, cfg
    if objective.evaluate is None:
        raise UserError(
            f"objective: a head for rows of {objective.task_type} needs `outputs`, by "
            "which they are scored and answered"
        )
    needs = objective.needs | {"labels"}
    return dataclasses.replace(objective, needs=needs), cfg


def with_floats(init: Callable[[jax.Array], Params]) -> Callable[[jax.Array], Params]:
    """Make an `init` raise UserError for parameters that are not arrays of floats."""

    def checked(rng: jax.Array) -> Params:
        params = init(rng)
        for path, leaf in leaves_of(params).items():
            dtype = getattr(leaf, "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                raise UserError(
                    f"objective: the head {path.partition('/')[0]}: init() makes "
                    f"{path} of type {dtype or type(leaf).__name__}: parameters are "
                    "arrays of floats"
                )
        return params

    return checked


def check_causal(
    name: str, heads: Sequence[Head], cfg: EncoderConfig, mixed: bool
) -> None:
    """Raise UserError for heads that cannot share rows with causal ones."""
    causal = [h.name for h in heads if h.causal]
    others = [h.name for h in heads if not (h.causal or h.task_type)]
    if cfg.is_decoder and others and (mixed or not causal):
        raise UserError(
            f"model.is_decoder=True: objective={name} has {' and '.join(others)}, "
            "whose tokens see later tokens: set model.is_decoder=False"
        )
    sees = dict.fromkeys(causal, "itself")
    if any(h.name == "prefix" for h in heads):
        sees["prefix"] = "its context"
    if pooled := [h.name for h in heads if h.pooled and sees and not mixed]:
        raise UserError(
            f"objective={name}: with {' and '.join(sees)} the first token sees only "
            f"{next(iter(sees.values()))}, and {' and '.join(pooled)} reads that "
            "token: leave one of the two out"
        )
    # Only heads that need no other rows are checked here; the code that prepares the
    # rows refuses combinations of different rows.
    rows = frozenset().union(*(h.needs for h in heads if h.causal))
    both = [h.name for h in heads if not h.causal and h.needs <= rows]
    if causal and both and not mixed:
        raise UserError(
            f"objective={name}: {' and '.join(causal)} predicts the next token, and "
            f"{' and '.join(both)} lets tokens see it: leave one of the two out"
        )


def task_type_of(objective: str) -> str | None:
    """Return the task type of an objective (Head.task_type), or None.

    Uses no device. Raises UserError as `make_objective` does.
    """
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1)
    cfg = EncoderConfig(8, hidden_size=8, intermediate_size=8, **sizes)
    return make_objective(objective, cfg)[0].task_type
