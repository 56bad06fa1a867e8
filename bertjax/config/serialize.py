# SPDX-License-Identifier: Apache-2.0
"""Write configs as JSON, read them back, and compare them."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import config_dict
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, __version__
from bertjax.config.schema import base, power_in_effect
from bertjax.models.config import RUNTIME
from bertjax.models.families import in_effect

# Keys that may differ between the workdir's config and the command's: they say where
# and how to run, not what. Data is compared by content (run.json), not by its path.
NOT_COMPARED = re.compile(
    r"(log|checkpoint|profile|mesh|hosts)\..*|eval\.every\..*"
    rf"|model\.({'|'.join(RUNTIME)})"
    r"|teacher|data\.(engine|cache|train|valid|vocab|similar|mask_weights|segmenter"
    r"|swap|concept|control|entities)|task\.index"
)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Write a nested config as {"optim.lr": 1e-4}, sorted."""
    out = {}
    for key in sorted(config):
        value = config[key]
        if isinstance(value, (Mapping, ConfigDict)):
            out.update(flatten(value, f"{prefix}{key}."))
        else:
            out[prefix + key] = value
    return out


def to_json(config: ConfigDict) -> str:
    """Write a config as JSON with sorted keys."""
    return json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n"


def from_json(text: str, where: Any = "a run") -> ConfigDict:
    """Read a config back; keys that its version did not have get their defaults.

    where: the origin of the config, for messages. Raises UserError if its model has
    keys that this version does not know: without them it would be another model.
    """
    config, stored = base(), json.loads(text)
    for key in sorted(stored.get("model", {}).keys() - config.model.keys()):
        raise UserError(
            f"{where}: model.{key} is not known to bertjax {__version__}: a later "
            "version wrote it, which is needed to open it"
        )
    optim = stored.get("optim", {})
    if "average" not in optim and optim.get("schedule") == "wsd":
        # Written by a version whose wsd had no optim.power and recorded 1.0 for all
        # schedules.
        optim["power"] = None
    config.update(config_dict.ConfigDict(stored))
    return config


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the empty model keys and optim.power of a flat config."""
    part = {k[6:]: v for k, v in config.items() if k.startswith("model.")}
    filled = {f"model.{k}": v for k, v in in_effect(part).items()}
    if "optim.power" in config:
        pair = config["optim.schedule"], config["optim.power"]
        filled["optim.power"] = power_in_effect(*pair)
    return {**config, **filled}


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys of flat configs that differ in effect, sorted.

    Of two models that are given by size, such as tiny and mini, only `model.size` is
    listed.
    """
    whole = [with_defaults(config) for config in configs]

    def differ(key: str, among: Sequence[Mapping[str, Any]]) -> bool:
        return any(one.get(key) != among[0].get(key) for one in among)

    keys = [k for k in sorted({k for x in whole for k in x}) if differ(k, whole)]
    given = [key for key in keys if differ(key, configs)]
    compared = {key for key in keys if not NOT_COMPARED.fullmatch(key)}
    model = {key for key in compared if key.startswith("model.")}
    return given if model & {*given} else sorted({*given, *model})


def differences(old: ConfigDict, new: ConfigDict) -> list[str]:
    """List the differences that matter, as "optim.lr: 0.0001 -> 0.5"."""
    flat = flatten(old), flatten(new)
    a, b = map(with_defaults, flat)
    keys = [key for key in differing(flat) if not NOT_COMPARED.fullmatch(key)]
    return [f"{key}: {a.get(key)} -> {b.get(key)}" for key in keys]
