# SPDX-License-Identifier: Apache-2.0
"""What a concept in texts does to a classifier: effects, and gaps of swapped words.

TReATE (Feder et al. 2021, CausaLM, arXiv 2005.13407, section 3) compares a classifier
on a model's representations with one on those of a model that has unlearnt the concept
(objectives/concept.py), CONEXP the texts with the concept and those without. Here each
classifier is a probe that was trained on its own representations, all frozen.
"""

from typing import NamedTuple

import numpy as np

from bertjax.scoring.confidence import half_width

Estimate = dict[str, float | None]  # "value", and "ci95": half of its 95% interval


def estimate(values: np.ndarray, weights: np.ndarray | None = None) -> Estimate:
    """Return the sum of values over that of weights, f64 [n], and its interval.

    Texts are the draws; the classifiers are as they are. Without weights it is a mean.
    """
    weights = np.ones(len(values)) if weights is None else weights
    width = half_width(values, weights, np.arange(len(values)))
    return {"value": float(values.sum() / weights.sum()), "ci95": width}


def total_variation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return half the sum of |a - b| over the classes [n, C]: of two classes the
    difference of one, f64 [n]."""
    return np.abs(np.asarray(a, np.float64) - b).sum(-1) / 2


class Outputs(NamedTuple):
    """Classifiers' probabilities of the outcome for texts, f64 [n, C], by a model's
    representations and by the treated model's; the probability that a text has the
    concept by the latter, f64 [n]; and whether it has, bool [n]."""

    factual: np.ndarray
    treated: np.ndarray
    expected: np.ndarray
    concept: np.ndarray


def treate(outputs: Outputs) -> Estimate:
    """Estimate by how much the outcome's probabilities change, on average over texts,
    when the representation loses the concept.

    The total variation between the two; E |P(y | c, z) - P(y | z)| where one shows
    concept c and rest z, and the other z alone. For a concept that half of the texts
    have, whatever z, that is half the difference between its two values.
    """
    return estimate(total_variation(outputs.factual, outputs.treated))


def conditional_expectation(outputs: Outputs) -> list[Estimate] | None:
    """Estimate CONEXP: how much likelier each outcome is among texts with the concept,
    an Estimate a class. What goes along with the concept is in it too. None where all
    texts have the concept, or none has."""
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
    """Estimate how much likelier each outcome becomes when a text gets the concept and
    all else stays, an Estimate a class: the differences of TReATE on the scale of
    CONEXP.

    The differences f - f' are regressed on c - E[c | rest]: the coefficient of the
    partially linear model f = d c + g(rest) (Robinson 1988, Root-N-consistent
    semiparametric regression). None where the treated representation tells the concept
    of each text, so that there is nothing to regress on.
    """
    rest = outputs.concept - outputs.expected
    if np.square(rest).mean() < 1e-6:
        return None
    change = np.asarray(outputs.factual, np.float64) - outputs.treated
    return [estimate(d * rest, rest**2) for d in change.T]


def most_likely(groups: np.ndarray, labels: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Return for each group in `of` its commonest label: i64 [n].

    groups, labels: i64 [m], those that are known; a group that is not among them has
    the commonest label of all.
    """
    common = np.full(max(groups.max(), of.max()) + 1, np.bincount(labels).argmax())
    for group in np.unique(groups):
        common[group] = np.bincount(labels[groups == group]).argmax()
    return common[of]
