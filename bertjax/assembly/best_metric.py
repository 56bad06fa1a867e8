# SPDX-License-Identifier: Apache-2.0
"""Which metric tells the best evaluation of a run, and in which direction."""

from collections.abc import Mapping
from typing import Any

import jax
from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.checkpoints import best
from bertjax.parallel import hosts
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.task_type import check_outputs


def directions(objective: Any, params: Any, batches: Any) -> dict[str, bool]:
    """Return {loss: whether more of it is better} of the terms that are optimised.

    That is where its coefficient is negative. params: shapes; batches: of a phase.
    Everything is traced as a step does it, so that terms that do not go with each other
    and outputs by which a task's rows cannot be scored are refused here: UserError.
    """
    batch = batches.batch(batches.start, slice(0, 1))
    losses = jax.eval_shape(objective.weights, batch)
    if objective.task_type:
        terms, found = jax.eval_shape(objective.evaluate, params, batch)
        check_outputs(objective.task_type, found)
    else:
        terms = jax.eval_shape(objective.sums, params, batch, None)
    if lost := sorted(losses.keys() - terms.keys()):
        raise UserError(
            f"objective: weights() names {', '.join(lost)}, which sums() does not "
            f"return; it returns {', '.join(terms)}"
        )
    if unknown := sorted(objective.coefficients.keys() - losses.keys()):
        raise UserError(
            f"objective: there are coefficients for {', '.join(unknown)}, which are no "
            f"losses; weights() names {', '.join(losses)}"
        )
    return {term: objective.coefficients.get(term, 1.0) < 0 for term in losses}


def make_tracker(
    config: ConfigDict,
    objective: Any,
    params: Any,
    valid: Mapping[str, Any],
    path: Any,
    restored: int | None,
    greater_is_better: best.Known,
) -> best.BestTracker:
    """Make what tells the best evaluation (eval.best), as far as the run has come.

    params: shapes; valid: the batches of each validation set; greater_is_better: what
    `directions` returns. Without a name a task's first metric counts, else the loss
    that weighs most. Raises UserError for a score that there is none of.
    """
    patience = config.eval.patience
    if not config.eval.best and patience is None:
        return best.BestTracker("", None)
    batch = next(next(iter(valid.values())).eval_batches(1))
    terms = jax.eval_shape(objective.sums, params, batch, None)
    losses = jax.eval_shape(objective.weights, batch)
    weigh = objective.coefficients
    heaviest = sorted(losses, key=lambda term: -weigh.get(term, 1.0))
    names = {}
    for name, batches in valid.items():
        metrics = batches.plans[0].scores if tasks.is_task(config) else ()
        names[name] = [*dict.fromkeys([*metrics, *heaviest, *terms])]
    metric = best.full_metric_name(config.eval.best, names)
    tracker = best.BestTracker(metric, patience, greater_is_better)
    if restored is not None:
        tracker.scores = hosts.from_primary(
            hosts.is_primary() and best.read(path, metric, restored)
        )
    return tracker
