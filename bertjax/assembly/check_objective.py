# SPDX-License-Identifier: Apache-2.0
"""Trace an objective's functions, so that mistakes are reported before training."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import RunError, UserError, counted, registry
from bertjax.assembly import resolve
from bertjax.assembly.open_teacher import make_measured_objective
from bertjax.checkpoints import best
from bertjax.data.corpus.sources import named_sources
from bertjax.data.features.mixed import MixedFeatures
from bertjax.measuring.synthetic_data import (
    Shape,
    batch_specs,
    expected_vocab_size,
    with_row_sizes,
)
from bertjax.objectives import parse
from bertjax.objectives.base import check_terms
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.task_type import check_outputs, get_task_type

LOOKED_AT = 50  # batches of a phase to check; one of them must have a prediction


@contextlib.contextmanager
def say_where(what: str) -> Iterator[None]:
    """Turn what a plug-in raises into a UserError that names its line.

    what: what was done. If the traceback shows a plug-in of a key that `what` does not
    name, the message names that plug-in instead.
    """
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as e:  # plug-ins may raise anything
        part = registry.part_at_fault(e)
        if not part or f"{part.partition('=')[0]}=" in what:
            part = what
        raise UserError(f"{part}: {registry.describe(e)}") from e


def check_arrays(batches: Any) -> None:
    """Refuse a plug-in's host half whose batches differ from its `specs`.

    batches: those of a phase. Of a mixture by rows each part is checked. Raises
    UserError.
    """
    if isinstance(batches.features, MixedFeatures):
        for part in batches.features.parts:
            check_arrays(dataclasses.replace(batches, features=part))
    half = type(batches.features)
    if half.__module__.startswith("bertjax."):
        return
    batch = batches.batch(batches.start, slice(0, 1))
    for name, spec in batches.specs.items():
        array, found = batch.get(name), "does not make it"
        if array is not None:
            shape, dtype = np.shape(array), getattr(array, "dtype", None)
            kind = type(array).__name__ if dtype is None else dtype
            found = f"makes {kind} {list(shape)}"
            same = dtype is not None and np.can_cast(dtype, spec.dtype, "same_kind")
            if same and shape[1:] == spec.shape:
                continue
        wanted = f"{spec.dtype} {[1, *spec.shape]} of a row"
        raise UserError(
            f"objective: specs() of {half.__module__}.{half.__name__} says that "
            f"{name!r} is {wanted}, its make() {found}"
        )


def directions(objective: Any, params: Any, batches: Any) -> dict[str, bool]:
    """Return {loss: whether higher is better} for the terms that are optimized.

    Higher is better if a term's coefficient is negative. params: shapes; batches: those
    of a phase. Everything is traced as in a step, so terms that do not fit together,
    and outputs that cannot score a task's rows, are refused here. Raises UserError.
    """
    batch = batches.batch(batches.start, slice(0, objective.group))
    losses = jax.eval_shape(objective.weights, batch)
    if objective.task_type:
        terms, found = jax.eval_shape(objective.evaluate, params, batch)
        check_outputs(objective.task_type, found)
    else:
        terms = jax.eval_shape(objective.sums, params, batch, None)
    check_terms("objective", terms)
    if lost := sorted(losses.keys() - terms.keys()):
        raise UserError(
            f"objective: weights() names {', '.join(lost)}, which sums() does not "
            f"return; it returns {', '.join(terms)}"
        )
    for name in losses:
        dtype = terms[name][0].dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise UserError(
                f"objective: sums() returns {name!r} as {dtype}, which has no gradient"
            )
    if unknown := sorted(objective.coefficients.keys() - losses.keys()):
        raise UserError(
            f"objective: there are coefficients for {', '.join(unknown)}, which are no "
            f"losses; weights() names {', '.join(losses)}"
        )
    return {term: objective.coefficients.get(term, 1.0) < 0 for term in losses}


def check_best(config: ConfigDict) -> None:
    """Refuse an eval.best that no evaluation will report.

    If plug-ins, a teacher or tables of rows determine the scores, they are known only
    once there are batches; so are those of tasks whose rows are several sequences.
    Raises UserError.
    """
    name, parts = config.eval.best, parse(config.objective)
    outside = map(registry.is_outside, [config.data.masking, *(p.name for p in parts)])
    if name in ("", best.AUTO) or config.teacher or any(outside):
        return
    metrics: tuple[str, ...] = ()
    usual: tuple[str, ...] = ()
    if tasks.is_task(config):
        task_type = get_task_type(config.objective)
        if task_type.several_sequences:
            return
        form = tasks.make_form(config)
        metrics = form.metrics
        usual = *task_type.metrics, *task_type.extra_scores(form)
    config = with_row_sizes(config)
    cfg = resolve.encoder_config(config, expected_vocab_size(config))
    objective, _ = make_measured_objective(config, cfg)
    if objective.tables or objective.needs_teacher:
        return
    size = objective.whole_batch or config.batch_size // config.accumulate
    shape = Shape(size, config.data.length, (resolve.eval_mask_rate(config),))
    batch = {
        key: jax.ShapeDtypeStruct((size, *spec.shape), spec.dtype)
        for key, spec in batch_specs(config, objective, shape).items()
    }
    params = jax.eval_shape(objective.init, jax.random.key(0))
    terms = jax.eval_shape(objective.sums, params, batch, None)
    sets = named_sources(config.data.valid, "data.valid")
    if config.data.group_field:  # then the sets are named after groups
        name = name.rpartition("/")[2]
    # Some metrics of a task depend on its rows.
    known = (*dict.fromkeys([*metrics, *usual, *terms]),)
    best.full_metric_name(name, dict.fromkeys(sets, known))


def check_predictions(batches: Any) -> None:
    """Refuse a phase whose batches have no predictions, since it would train nothing.

    It checks batches spread over the phase, because a mask rate may begin near 0;
    usually the first one suffices. Raises UserError.
    """
    start, end, names = batches.start, batches.end, batches.loss_weights
    steps = range(start, end, -(-(end - start) // LOOKED_AT) or 1)
    if not names or not steps:
        return
    for step in steps:
        batch = batches.batch(step)
        if any(batch[name].any() for name in names):
            return
    looked_at = counted(len(steps), "batch was", "batches were")
    raise UserError(
        f"no token is predicted between steps {start:,} and {end:,}, of which "
        f"{looked_at} looked at: what data.masking names, or the objective's host "
        "half, chooses none (bertjax.show shows its rows)"
    )
