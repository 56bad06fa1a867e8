# SPDX-License-Identifier: Apache-2.0
"""The effect of a concept in texts on a classifier.

TReATE (Feder et al. 2021, CausaLM, arXiv 2005.13407, section 3) compares a classifier
on a model's representations with one on those of a treated model, which has unlearned
the concept (objectives/concept.py). CONEXP compares the texts with the concept and
those without. Here each classifier is a probe that was trained on its own model's
frozen representations.
"""

from typing import NamedTuple

import numpy as np

from bertjax.scoring.confidence import half_width

Estimate = dict[str, float | None]  # "value", and "ci95": half of its 95% interval


def estimate(values: np.ndarray, weights: np.ndarray | None = None) -> Estimate:
    """Return sum(values) / sum(weights), both f64 [n], and its 95% interval.

    Without weights it is the mean. The interval is over draws of the texts; the
    classifiers are considered fixed.
    """
    weights = np.ones(len(values)) if weights is None else weights
    width = half_width(values, weights, np.arange(len(values)))
    return {"value": float(values.sum() / weights.sum()), "ci95": width}


def total_variation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return half the sum of |a - b| [n, C] over the classes: f64 [n].

    For two classes it is the absolute difference of either probability.
    """
    return np.abs(np.asarray(a, np.float64) - b).sum(-1) / 2


class Outputs(NamedTuple):
    """What classifiers predict for texts.

    factual, treated: f64 [n, C], the probabilities of the outcomes, from the model's
    and from the treated model's representations. expected: f64 [n], the probability of
    the concept from the treated model's representations. concept: bool [n], whether a
    text has the concept.
    """

    factual: np.ndarray
    treated: np.ndarray
    expected: np.ndarray
    concept: np.ndarray


def treate(outputs: Outputs) -> Estimate:
    """Estimate TReATE: how much the outcome's probabilities depend on the concept.

    It is the mean over texts of the total variation between the two representations:
    E |P(y | c, z) - P(y | z)|, if the first shows the concept c and the rest z, and the
    second only z. For a concept that half of the texts have, whatever z, this is half
    the difference between the concept's two values.
    """
    return estimate(total_variation(outputs.factual, outputs.treated))


def conditional_expectation(outputs: Outputs) -> list[Estimate] | None:
    """Estimate CONEXP: how much likelier each outcome is in texts with the concept.

    Returns one Estimate per class, which includes the effects of whatever correlates
    with the concept. Returns None if all texts have the concept, or none has.
    """
    if len(np.unique(outputs.concept)) < 2:
        return None
    found = []
    for p in np.asarray(outputs.factual, np.float64).T:
        with_it, without = (estimate(p[outputs.concept == has]) for has in (1, 0))
        widths = with_it["ci95"], without["ci95"]
        width = None if None in widths else float(np.hypot(*widths))
        found.append({"value": with_it["value"] - without["value"], "ci95": width})
    return found


def effect(outputs: Outputs) -> list[Estimate] | None:
    """Estimate how much likelier each outcome becomes when only the concept is added.

    Returns one Estimate per class: the differences of TReATE on the scale of CONEXP.
    The differences f - f' are regressed on c - E[c | rest], which gives the coefficient
    d of the partially linear model f = d c + g(rest) (Robinson 1988, Root-N-consistent
    semiparametric regression). Returns None if the treated representation reveals the
    concept of each text, so that there is nothing to regress on.
    """
    rest = outputs.concept - outputs.expected
    if np.square(rest).mean() < 1e-6:
        return None
    change = np.asarray(outputs.factual, np.float64) - outputs.treated
    return [estimate(d * rest, rest**2) for d in change.T]


def most_likely(groups: np.ndarray, labels: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Return the most common label of each group in `of`: i64 [n].

    groups, labels: i64 [m], the known examples; for a group that is not among them it
    is the most common label of all.
    """
    common = np.full(max(groups.max(), of.max()) + 1, np.bincount(labels).argmax())
    for group in np.unique(groups):
        common[group] = np.bincount(labels[groups == group]).argmax()
    return common[of]
