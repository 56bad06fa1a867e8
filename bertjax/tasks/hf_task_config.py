# SPDX-License-Identifier: Apache-2.0
"""The keys of an exported model's config.json that only bertjax reads: its task's."""

from collections.abc import Mapping
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.tasks import prepare_task
from bertjax.tasks.task_type import get_task_type

PREFIX = "bertjax_"  # of these keys
THRESHOLD = f"{PREFIX}threshold"
WORDS = "text", "text_pair", "choices", "label", "target", "metrics"


def to_json(
    task: Mapping[str, Any], config: ConfigDict, raw: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the keys of a task: the columns of its tables, its settings and metrics,
    or those that its type exports, and the threshold.

    task: the task's part of the checkpoint (prepare_task.py's `facts`), {} for none.
    raw: the config.json of an imported model; keys that it lacks are then left out,
    since they are not known.
    """
    if not task or (task_type := get_task_type(config.objective)).makes_vectors:
        return {}
    words = [k for k in WORDS if config.task[k] and k not in task_type.unused]
    keys = *words, *task_type.settings
    if task_type.exported is not None:
        keys = task_type.exported
    named = {f"{PREFIX}{key}": config.task[key] for key in keys}
    if "threshold" in task:
        named[THRESHOLD] = task["threshold"]
    known = raw if raw and "architectures" in raw else named
    return {key: value for key, value in named.items() if key in known}


def from_json(raw: Mapping[str, Any], config: ConfigDict, where: str) -> dict[str, Any]:
    """Set the keys of config.task from a config.json; return the threshold, if any.

    Returns {"threshold": number} or {}. Raises UserError for invalid values.
    """
    task_type = get_task_type(config.objective)
    for key in (*WORDS, *task_type.settings):
        value = raw.get(f"{PREFIX}{key}", config.task[key])
        what, fits = "text", type(value) is str
        if key not in WORDS:
            what = "number of pieces"
            fits = type(value) is int and 1 <= value <= 2**16
        if not fits:
            raise UserError(f"{where}: {PREFIX}{key}={value!r} has to be a {what}")
        config.task[key] = value
    try:
        prepare_task.check_task(config)
    except UserError as e:
        raise UserError(f"{where}: {PREFIX}* in config.json: {e}") from None
    threshold = raw.get(THRESHOLD) if task_type.has_threshold else None
    if threshold is None:
        return {}
    if type(threshold) not in (int, float) or not abs(threshold) < 1e9:
        raise UserError(f"{where}: {THRESHOLD}={threshold!r:.40} has to be a number")
    return {"threshold": float(threshold)}
