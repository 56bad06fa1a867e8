# SPDX-License-Identifier: Apache-2.0
"""Every module here but these is an objective that a config can name."""

from bertjax import registry

SUPPORT = ("base", "losses", "metrics", "pair")


def parse(objective: str) -> list[tuple[str, dict[str, registry.Option]]]:
    """Read config.objective: module names joined by +, each with options after a colon.

    >>> parse("mlm+sop"), parse("electra:generator=0.25,discriminator_weight=50")
    ([('mlm', {}), ('sop', {})], [('electra', {'generator': 0.25, ...: 50})])

    The options are arguments of the module's make_head or make_objective. Raises
    UserError where one is not OPTION=VALUE.
    """
    parts = objective.split("+")
    return [registry.parse_options(part, "objective") for part in parts]


def task_type(objective: str) -> str | None:
    """Return the labelled rows that an objective says it learns from; None: none.

    Imports its module, and with it jax; no device is used. Raises UserError.
    """
    from bertjax.models.config import EncoderConfig
    from bertjax.objectives.base import make_objective

    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1)
    cfg = EncoderConfig(8, hidden_size=8, intermediate_size=8, **sizes)
    return make_objective(objective, cfg)[0].task_type
