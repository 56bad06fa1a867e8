# SPDX-License-Identifier: Apache-2.0
"""What config.json of an exported model says of its task that bertjax alone reads."""

from collections.abc import Mapping
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.tasks import prepare_task
from bertjax.tasks.task_type import get_task_type

PREFIX = "bertjax_"  # begins such keys
THRESHOLD = f"{PREFIX}threshold"
WORDS = "text", "text_pair", "choices", "label", "metrics"


def to_json(
    task: Mapping[str, Any], config: ConfigDict, raw: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the columns of its tables and its metrics; of questions, whose files name
    everything, their limits and the threshold.

    task: what the checkpoint says (prepare_task.py's `facts`), {} of no task. raw: the
    config.json of a model that was imported: what it does not say is not known.
    """
    task_type = get_task_type(config.objective) if task else None
    if not task_type or task_type.makes_vectors:
        return {}
    words = [key for key in WORDS if key not in task_type.unused]
    values = {key: config.task[key] for key in words if config.task[key]}
    values |= {key: config.task[key] for key in task_type.settings}
    if "threshold" in task:
        values["threshold"] = task["threshold"]
    named = {f"{PREFIX}{key}": value for key, value in values.items()}
    if raw and "architectures" in raw:
        return {key: value for key, value in named.items() if key in raw}
    return named


def from_json(raw: Mapping[str, Any], config: ConfigDict, where: str) -> dict[str, Any]:
    """Return what such a config.json tells of a task, the rest to config.task.

    Raises UserError.
    """
    task_type = get_task_type(config.objective)
    for key in WORDS:
        value = raw.get(f"{PREFIX}{key}", config.task[key])
        if type(value) is not str:
            raise UserError(f"{where}: {PREFIX}{key}={value!r} has to be a text")
        config.task[key] = value
    for key in task_type.settings:
        value = raw.get(f"{PREFIX}{key}", config.task[key])
        if type(value) is not int or not 1 <= value <= 2**16:
            raise UserError(
                f"{where}: {PREFIX}{key}={value!r} has to be a number of pieces"
            )
        config.task[key] = value
    try:
        prepare_task.check_task(config)
    except UserError as e:
        raise UserError(f"{where}: {PREFIX}* in config.json: {e}") from None
    threshold = raw.get(THRESHOLD) if task_type.has_threshold else None
    if threshold is None:
        return {}
    if type(threshold) not in (int, float) or not abs(threshold) < 1e9:
        raise UserError(
            f"{where}: {THRESHOLD}={repr(threshold)[:40]} has to be a number"
        )
    return {"threshold": float(threshold)}
