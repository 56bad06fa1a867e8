# SPDX-License-Identifier: Apache-2.0
"""What config.json of an exported model says of its task that bertjax alone reads."""

import math
from collections.abc import Mapping
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.tasks.rows import Limits

PREFIX = "bertjax_"  # begins such keys
THRESHOLD = f"{PREFIX}threshold"
COLUMNS = "text", "text_pair", "choices", "label"


def to_json(task: Mapping[str, Any], config: ConfigDict) -> dict[str, Any]:
    """Return the columns of its tables; of questions, whose files name everything,
    their limits and the threshold.

    task: what the checkpoint says (tasks/prepare.py's `facts`), {} of no task.
    """
    if not task or config.objective == "retrieve":
        return {}
    keys = Limits._fields if config.objective == "span" else COLUMNS
    told = {f"{PREFIX}{key}": config.task[key] for key in keys}
    return told | ({THRESHOLD: task["threshold"]} if "threshold" in task else {})


def from_json(raw: Mapping[str, Any], config: ConfigDict, where: str) -> dict[str, Any]:
    """Return what such a config.json tells of a task, the rest to config.task.

    Raises UserError.
    """
    if config.objective != "span":
        for key in COLUMNS:
            said = raw.get(f"{PREFIX}{key}", config.task[key])
            if type(said) is not str:
                raise UserError(f"{where}: {PREFIX}{key}={said!r} is no column's name")
            config.task[key] = said
        return {}
    for key in Limits._fields:
        said = raw.get(f"{PREFIX}{key}", config.task[key])
        if type(said) is not int or not 1 <= said <= 2**16:
            raise UserError(f"{where}: {PREFIX}{key}={said!r} is no number of pieces")
        config.task[key] = said
    said = raw.get(THRESHOLD)
    if said is None:
        return {}
    if type(said) not in (int, float) or not math.isfinite(said):
        raise UserError(f"{where}: {THRESHOLD}={said!r} is no number")
    return {"threshold": float(said)}
