# SPDX-License-Identifier: Apache-2.0
"""Every module here but these is an objective that a config can name."""

from bertjax import registry

SUPPORT = ("base", "losses", "metrics", "pair", "task_head")


def parse(objective: str) -> list[tuple[str, dict[str, registry.Option]]]:
    """Read config.objective: module names joined by +, each with options after a colon.

    >>> parse("mlm+sop"), parse("electra:generator=0.25,discriminator_weight=50")
    ([('mlm', {}), ('sop', {})], [('electra', {'generator': 0.25, ...: 50})])

    The options are arguments of the module's make_head or make_objective. Raises
    UserError where one is not OPTION=VALUE.
    """
    parts = objective.split("+")
    return [registry.parse_options(part, "objective") for part in parts]
