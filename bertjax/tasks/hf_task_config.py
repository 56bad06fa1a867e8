# SPDX-License-Identifier: Apache-2.0
"""What config.json of an exported model says of its task that bertjax alone reads."""

from collections.abc import Mapping
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.tasks import prepare_task
from bertjax.tasks.task_rows import Limits

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
    if not task or prepare_task.task_type(config.objective) == "retrieve":
        return {}
    told = {key: config.task[key] for key in _words(config) if config.task[key]}
    if prepare_task.task_type(config.objective) == "span":
        told |= {key: config.task[key] for key in Limits._fields}
        told |= {"threshold": task["threshold"]} if "threshold" in task else {}
    named = {f"{PREFIX}{key}": value for key, value in told.items()}
    if raw and "architectures" in raw:
        return {key: value for key, value in named.items() if key in raw}
    return named


def from_json(raw: Mapping[str, Any], config: ConfigDict, where: str) -> dict[str, Any]:
    """Return what such a config.json tells of a task, the rest to config.task.

    Raises UserError.
    """
    for key in WORDS:
        said = raw.get(f"{PREFIX}{key}", config.task[key])
        if type(said) is not str:
            raise UserError(f"{where}: {PREFIX}{key}={said!r} is no name")
        config.task[key] = said
    for key in (
        Limits._fields if prepare_task.task_type(config.objective) == "span" else ()
    ):
        said = raw.get(f"{PREFIX}{key}", config.task[key])
        if type(said) is not int or not 1 <= said <= 2**16:
            raise UserError(f"{where}: {PREFIX}{key}={said!r} is no number of pieces")
        config.task[key] = said
    try:
        prepare_task.check_task(config)
    except UserError as e:
        raise UserError(f"{where}: {PREFIX}* in config.json: {e}") from None
    said = (
        raw.get(THRESHOLD)
        if prepare_task.task_type(config.objective) == "span"
        else None
    )
    if said is None:
        return {}
    if type(said) not in (int, float) or not abs(said) < 1e9:
        raise UserError(f"{where}: {THRESHOLD}={repr(said)[:40]} is no number")
    return {"threshold": float(said)}


def _words(config: ConfigDict) -> list[str]:
    """Which of WORDS say something to an objective."""
    return [
        key for key in WORDS if key not in prepare_task.kind_of(config.objective).unused
    ]
