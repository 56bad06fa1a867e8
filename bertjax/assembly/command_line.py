# SPDX-License-Identifier: Apache-2.0
"""Parse the command line of a command into its flags and its resolved config."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from absl import flags
from ml_collections import config_flags
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, registry
from bertjax.assembly.init_from import follow_init_from, follow_teacher
from bertjax.config import flag_errors, flag_help
from bertjax.config.arguments import check_type, config_first
from bertjax.config.durations import UNITS, resolve_durations
from bertjax.config.schema import base
from bertjax.config.serialize import flatten
from bertjax.models.families import scale_of_width
from bertjax.tasks import prepare_task as tasks


def parse(
    argv: Sequence[str],
    own: flag_help.Table = MappingProxyType({}),
    doc: str | None = None,
    needs_config: bool = True,
    words: bool = False,
) -> flags.FlagValues:
    """Parse a command's flags; own: its flags besides those of the config.

    doc: the beginning of --help. With `words`, the result's `words` has the other
    arguments. The result's `config` is the resolved ConfigDict (each duration has one
    unit), and `overrides` is what the command line changed. Raises UserError with one
    line; --help ends the command.
    """
    values = flag_help.define_flags(own)
    if doc and {"--help", "-h"} & {*argv}:
        print(flag_help.describe(doc, own, needs_config))
        raise SystemExit(0)
    if needs_config:
        argv = config_first(list(argv))
        config_flags.DEFINE_config_file(
            "config", None, "", flag_values=values, sys_argv=["", *argv]
        )
    try:
        rest = values([sys.argv[0], *argv])
    except Exception as e:  # a config file may raise anything
        raise UserError(flag_errors.explain(e, argv, values)) from e
    if words:
        flags.DEFINE_list("words", [], "", flag_values=values)
        values.mark_as_parsed()
        values["words"].value = rest[1:]
    elif len(rest) > 1:
        raise UserError(f"{rest[1]!r} is not a flag: write --name=value")
    for name in own:
        value = values[name].value
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--{name}={value} is not a finite number")
    if needs_config:
        file = next((a for a in argv if a.startswith("--config=")), "")
        if not file:
            raise UserError("--config is missing, for instance --config=bert.py:mini")
        check_type(file.removeprefix("--config="), values.config)
        overrides = config_flags.get_override_values(values["config"])
        settle_config(values.config, overrides, file)
        flags.DEFINE_string("overrides", json.dumps(overrides), "", flag_values=values)
        values.mark_as_parsed()
    return values


def settle_config(
    config: ConfigDict, overrides: Mapping[str, Any], where: str = "config"
) -> None:
    """Set the values of a config that follow from others, in place.

    Each duration keeps one unit, a named task sets its columns, a width sets its scale
    of logits (T5's), init_from sets the architecture. overrides: {key: value} that
    stay. where: begins messages. Raises UserError, also for missing or unknown keys,
    for keys without a value, and for numbers that are not finite.
    """
    known, given = flatten(base()), flatten(config)
    for key in sorted(given.keys() - known.keys()):
        section = key.rpartition(".")[0]
        beside = [k for k in known if k.rpartition(".")[0] == section]
        raise registry.unknown(f"{where}: key", key, beside or known)
    if lacking := sorted(known.keys() - given.keys()):
        raise UserError(
            f"{where} lacks the keys {', '.join(lacking[:5])}: begin with "
            "bertjax.config.base()"
        )
    for key, default in known.items():
        value = given[key]
        if key.rpartition(".")[2] in UNITS:
            continue
        if value is None and default is not None:
            raise UserError(f"{where}: {key} is None; its default is {default!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key}={value} is not a finite number")
    resolve_durations(config, overrides)
    tasks.settle(config, overrides)
    if scale := scale_of_width(config.model):
        config.model.logit_scale = scale
    follow_init_from(config, overrides)
    follow_teacher(config, overrides)
