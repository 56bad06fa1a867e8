# SPDX-License-Identifier: Apache-2.0
"""Objectives: each module here is one that a config can name, except SUPPORT."""

import re
from typing import NamedTuple

from bertjax import UserError, registry

SUPPORT = (
    "base",
    "combine",
    "entity_ranks",
    "find_passages",
    "losses",
    "make_objective",
    "metrics",
    "pair",
    "piecewise_gradient",
    "ranking",
    "task_head",
    "teacher",
    "token_head",
)

# Objectives that train the head over the vocabulary on the next token only.
CAUSAL = frozenset({"clm", "prefix", "cuglm"})
# Objectives that predict a masked token from the position before it.
BEFORE = frozenset({"mntp"})


class Part(NamedTuple):
    """A part of config.objective: a module and its options.

    rows: in a mixture by rows, how many rows of each group belong to this part; None:
    all rows.
    """

    name: str
    options: dict[str, registry.Option]
    rows: int | None = None


def parse(objective: str) -> list[Part]:
    """Parse config.objective: module names joined by +, with options after a colon.

    >>> parse("mlm+sop"), parse("electra:generator=0.25,discriminator_weight=50")
    ([Part(name='mlm', ...), Part(name='sop', ...)], [Part(name='electra', ...)])
    >>> [(part.name, part.rows) for part in parse("mntp*15+clm*1")]
    [('mntp', 15), ('clm', 1)]

    The options are arguments of the module's make_head or make_objective. Raises
    UserError if an option is not OPTION=VALUE, or if only some parts have row counts.
    """
    parts = []
    for text in objective.split("+"):
        mixed = re.fullmatch(r"(.+)\*(\d+)", text)
        one = registry.parse_options(mixed[1] if mixed else text, "objective")
        parts.append(Part(*one, int(mixed[2]) if mixed else None))
    counts = {part.rows for part in parts}
    if counts == {0} or (None in counts and counts != {None}):
        raise UserError(
            f"objective={objective!r}: in a mixture by rows each part says how many "
            "rows of a group are its own, such as mntp*15+clm*1"
        )
    return parts


def part_names(objective: str) -> set[str]:
    """Return the names of an objective's parts, except those with a count of 0 rows."""
    return {part.name for part in parse(objective) if part.rows != 0}
