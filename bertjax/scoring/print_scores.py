# SPDX-License-Identifier: Apache-2.0
"""Scores as bertjax.evaluate prints them: JSON for programs, lines for people."""

import json
from typing import Any

from bertjax.checkpoints.workdir import finite


def about(model: str, meta: dict[str, Any]) -> dict[str, Any]:
    """Return whose scores they are: the path that was given, and the step.

    meta: what the checkpoint says of itself; an imported model's step is 0.
    """
    return {"model": model, "step": meta.get("step", 0)}


def at_step(meta: dict[str, Any]) -> str:
    """Say the step in a heading; an imported model has none to tell."""
    return f" at step {meta['step']}" if "step" in meta else ""


def print_json(about: dict[str, Any], found: dict[str, dict[str, Any]]) -> None:
    """Print the values of each validation set, beside what is said of all."""
    first, *more = found.values()
    told = about | ({"eval": found} if more else first)
    print(json.dumps(finite(told)))


def say_found(
    found: dict[str, dict[str, Any]], model: str, meta: dict[str, Any], as_json: bool
) -> int:
    """Print the values of each validation set; returns the exit status."""
    if as_json:
        print_json(about(model, meta), found)
        return 0
    for name, values in found.items():
        print(f"{name}{at_step(meta)}:")
        say_values(values)
    return 0


def say_values(values: dict[str, Any]) -> None:
    """Print a value a line; of values by type, those of each type in one."""
    for key, value in values.items():
        if not isinstance(value, dict):
            print(f"  {key:24} {value:,.4f}".rstrip("0").rstrip("."))
            continue
        for part, scores in value.items():
            told = (f"{name} {score:,.4g}" for name, score in scores.items())
            print(f"  {key}: {part:17} {', '.join(told)}")
