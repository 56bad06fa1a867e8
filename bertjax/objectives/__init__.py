# SPDX-License-Identifier: Apache-2.0
"""Every module here but these is an objective that a config can name."""

from bertjax import UserError

SUPPORT = ("base", "losses", "metrics", "pair")


def parse(objective: str) -> list[tuple[str, dict[str, float]]]:
    """Read config.objective: module names joined by +, each with options after a colon.

    >>> parse("mlm+sop"), parse("electra:generator=0.25,discriminator_weight=50")
    ([('mlm', {}), ('sop', {})], [('electra', {'generator': 0.25, ...: 50.0})])

    The options are arguments of the module's make_head or make_objective. Raises
    UserError where one is no NAME=NUMBER.
    """
    found = []
    for part in objective.split("+"):
        name, _, rest = part.partition(":")
        options = {}
        for option in filter(None, rest.split(",")):
            key, _, number = option.partition("=")
            try:
                options[key] = float(number)
            except ValueError:
                raise UserError(
                    f"objective={objective!r}: {option!r} is no NAME=NUMBER"
                ) from None
        found.append((name, options))
    return found


def task_type(objective: str) -> str | None:
    """Return the labelled rows that an objective says it learns from; None: none.

    Imports its module, and with it jax; no device is used. Raises UserError.
    """
    from bertjax.models.config import EncoderConfig
    from bertjax.objectives.base import make_objective

    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 1)
    cfg = EncoderConfig(8, hidden_size=8, intermediate_size=8, **sizes)
    return make_objective(objective, cfg)[0].task_type
