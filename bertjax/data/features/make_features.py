# SPDX-License-Identifier: Apache-2.0
"""Create the host half that an objective names in its `needs`."""

from typing import NamedTuple

from bertjax import UserError, registry
from bertjax.data.features.base import Features, Settings
from bertjax.data.features.mixed import MixedFeatures

PACKAGE = "bertjax.data.features"
# Modules of this package that are not host halves.
SUPPORT = (
    "base",
    "concept_labels",
    "encoder_decoder",
    "make_features",
    "mixed",
    "noise_operations",
    "noise_texts",
)
PAIR_RULES = ("nsp", "sop")  # needs that the plan of the rows fulfills
LABELS = "labels"  # the need of objectives that train on the rows of a task


class Needs(NamedTuple):
    """What an objective needs from the host: at most one of each.

    features: a name with its options, or a mixture of them by rows, "a*15+b*1".
    pair_rule: the rule by which sentence pairs are drawn. labels: whether the objective
    needs the rows of a task.
    """

    features: str | None
    pair_rule: str | None
    labels: bool


def split_needs(needs: frozenset[str]) -> Needs:
    """Split the names that an objective's heads need. Raises UserError if two clash."""
    rules = sorted(needs & {*PAIR_RULES})
    halves = sorted(needs - {*PAIR_RULES, LABELS})
    if len(rules) > 1:
        raise UserError(f"one pair objective at a time, not {' and '.join(rules)}")
    if len(halves) > 1:
        for half in halves:
            for one in half.split("+") if "*" in half else [half]:
                name, _ = registry.parse_options(one.rpartition("*")[0] or one)
                registry.check_module("objective: needs", name, PACKAGE, SUPPORT)
        raise UserError(
            f"objective: {' and '.join(halves)} each prepare the rows of text in their "
            f"own way: mix them by rows, objective={'+'.join(f'{h}*1' for h in halves)}"
        )
    one = halves[0] if halves else None
    return Needs(one, rules[0] if rules else None, LABELS in needs)


def make_features(name: str, settings: Settings) -> Features:
    """Create the host half of a name in an objective's needs. Raises UserError."""
    if "*" in name:
        parts = [text.rpartition("*") for text in name.split("+")]
        counted = [(make_features(one, settings), int(n)) for one, _, n in parts]
        return MixedFeatures(name, counted, settings)
    module_name, options = registry.parse_options(name, "objective: needs")
    module = registry.load("objective: needs", module_name, PACKAGE, SUPPORT)
    return registry.make("objective", module, "make_features", options, settings)
