# SPDX-License-Identifier: Apache-2.0
"""Trace what an objective returns, so that what is wrong with it is said in one line
before anything is trained."""

import contextlib
import os
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import bertjax
from bertjax import RunError, UserError, counted
from bertjax.objectives.base import check_terms
from bertjax.tasks.task_type import check_outputs

# Where a part from outside is not: this package, the libraries, Python's own modules.
_FOLDERS = (
    Path(bertjax.__file__).parent,
    Path(os.__file__).parent,
    Path(jax.__file__).parents[1],
)
INSIDE = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)
SITE = INSIDE[-1]  # where a part from outside may be installed, too
_LIBRARIES = "flax", "jax", "jaxlib", "ml_collections", "numpy", "optax", "tensorflow"
LIBRARIES = INSIDE[0], *(f"{SITE}{name}{os.sep}" for name in _LIBRARIES)
LOOKED_AT = 50  # batches of a phase, one of which has to predict something


@contextlib.contextmanager
def say_where(what: str) -> Iterator[None]:
    """Turn what a part from outside raises into a UserError that names its line."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as e:  # whatever a part from outside may do
        frame = line_at_fault(traceback.extract_tb(e.__traceback__))
        reason = " ".join(str(e).split())
        raise UserError(
            f"{what}: {type(e).__name__}: {reason} "
            f"({frame.filename}, line {frame.lineno})"
        ) from e


def line_at_fault(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """Return the last line of a part from outside; of one that is installed among the
    libraries the last that is none of those which compute; without one the last."""
    outside = [f for f in frames if not f.filename.startswith(INSIDE)]
    installed = [
        f
        for f in frames
        if f.filename.startswith(SITE) and not f.filename.startswith(LIBRARIES)
    ]
    return (outside or installed or frames)[-1]


def directions(objective: Any, params: Any, batches: Any) -> dict[str, bool]:
    """Return {loss: whether more of it is better} of the terms that are optimised.

    That is where its coefficient is negative. params: shapes; batches: of a phase.
    Everything is traced as a step does it, so that terms that do not go with each other
    and outputs by which a task's rows cannot be scored are refused here: UserError.
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
    if unknown := sorted(objective.coefficients.keys() - losses.keys()):
        raise UserError(
            f"objective: there are coefficients for {', '.join(unknown)}, which are no "
            f"losses; weights() names {', '.join(losses)}"
        )
    return {term: objective.coefficients.get(term, 1.0) < 0 for term in losses}


def check_predictions(batches: Any) -> None:
    """Refuse a phase whose batches have no prediction, and would teach nothing:
    UserError.

    Some are looked at, spread over the phase, since a mask rate may begin near 0;
    usually the first says enough.
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
