# SPDX-License-Identifier: Apache-2.0
"""Durations in one of steps, epochs, examples, tokens, percent."""

from collections.abc import Mapping
from typing import Any

from ml_collections.config_dict import ConfigDict, placeholder

from bertjax import UserError, registry

UNITS = dict(steps=int, epochs=float, examples=int, tokens=int, percent=float)


def duration(**given: float) -> ConfigDict:
    """Build a duration in one of steps, epochs, examples, tokens, percent (of the run).

    Raises UserError for an unknown unit and for a value that is not such a number.
    """
    numbers = {unit: _number(unit, value) for unit, value in given.items()}
    return ConfigDict({u: numbers.get(u, placeholder(t)) for u, t in UNITS.items()})


class Section(ConfigDict):
    """A section of the config, with durations.

    A duration may be replaced by a dict of one unit. Raises UserError for a plain
    number in its place.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        if is_duration(self.get(key)):
            if isinstance(value, int | float):
                others = ", ".join(f".{unit}" for unit in [*UNITS][1:])
                raise UserError(
                    f"{key} = {value} has no unit: write {key}.steps = {value}, or "
                    f"{others} for .steps"
                )
            if isinstance(value, dict):
                value = duration(**value)
        super().__setitem__(key, value)


def is_duration(value: Any) -> bool:
    """Return whether a value of a config is a duration."""
    return isinstance(value, ConfigDict) and set(UNITS) <= set(value)


def _number(unit: str, value: Any) -> float:
    kind = registry.pick("duration", unit, UNITS)
    try:
        if (number := kind(value)) == (
            float(value) if isinstance(value, str) else value
        ):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    what = "a whole number" if kind is int else "a number"
    raise UserError(f"duration({unit}={value!r}): this is not {what}")


def durations(config: ConfigDict, prefix: str = "") -> dict[str, ConfigDict]:
    """Find every duration of a config, by its dotted name."""
    by_name = {}
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            if is_duration(value):
                by_name[prefix + key] = value
            else:
                by_name |= durations(value, f"{prefix}{key}.")
    return by_name


def resolve_durations(config: ConfigDict, overrides: Mapping[str, Any]) -> None:
    """Let a unit given on the command line replace the others; refuse two units."""
    for name, value in durations(config).items():
        given = [u for u in UNITS if f"{name}.{u}" in overrides]
        if given:
            for unit in UNITS:
                if unit not in given:
                    value[unit] = None
        units = [u for u in UNITS if value[u] is not None]
        if len(units) != 1:
            given = " and ".join(units) or "none of them"
            raise UserError(f"{name} needs one of {', '.join(UNITS)}; it has {given}")
        if not 0 <= value[units[0]] < 1e18:
            raise UserError(
                f"{name}.{units[0]}={value[units[0]]} must be at least 0 and below 1e18"
            )


def unit_of(config: ConfigDict, name: str) -> tuple[str, float]:
    """Return the unit of a resolved duration, and its number."""
    value = durations(config)[name]
    unit = next(u for u in UNITS if value[u] is not None)
    return unit, value[unit]
