# SPDX-License-Identifier: Apache-2.0
"""From the command line to a resolved config: files, overrides, durations, checks.

Nothing here imports jax: what is wrong with a config is said before that.
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_dict, config_flags
from ml_collections.config_dict import ConfigDict

from bertjax import RunError, UserError, faults, registry, usage
from bertjax.data import phases, pipeline
from bertjax.data.masks import masking
from bertjax.defaults import (
    UNITS,
    base,
    duration,
    finetuning,
    make_smoke,
    read_arg,
    split_arg,
)
from bertjax.models.config import RUNTIME, EncoderConfig
from bertjax.models.families import FAMILIES, in_effect

__all__ = [  # what configs are written with, by one name with the rest
    "UNITS", "base", "duration", "finetuning", "make_smoke", "read_arg", "split_arg",
]  # fmt: skip

# What may differ between a workdir's config and the command's: where and how, not
# what. Data is compared by content (run.json), not by the spelling of its path.
FREE = re.compile(
    r"(log|checkpoint|profile|mesh|hosts)\..*|eval\.every\..*"
    rf"|model\.({'|'.join(RUNTIME)})"
    r"|data\.(engine|cache|train|valid|vocab|similar|segmenter)"
)
SPELLED = {"num_hidden_layers", "hidden_size", "num_attention_heads"}


# ---------------------------------------------------------------- reading commands
def find_config(path: str) -> str:
    """Return the file of "configs/x.py:ARG", or of a name shipped in the package.

    Raises UserError when there is none.
    """
    file, colon, arg = path.partition(":")
    package = Path(__file__).parent
    shipped = package / "configs"
    if not shipped.is_dir():  # a checkout; beside an installed package lie others'
        shipped = package.parent / "configs"
    for folder in (Path(), shipped):
        if (folder / file).is_file():
            return f"{folder / file}{colon}{arg}"
    known = [p for p in shipped.rglob("*.py") if p.stem != "__init__"]
    names = [p.relative_to(shipped).as_posix() for p in known]
    raise registry.unknown("--config", file, names)


def parse(
    argv: Sequence[str],
    define: Callable[[flags.FlagValues], None] | None = None,
    needs_config: bool = True,
    words: bool = False,
) -> flags.FlagValues:
    """Read a command's flags; `define` adds the command's own.

    With `words` the rest of the line is in the result's `words`. The result's `config`
    is the resolved ConfigDict (durations with one unit each) and `overrides` what the
    command line changed. Raises UserError in one line; --help ends the command.
    """
    values = flags.FlagValues()
    if define:
        define(values)
        if {"--help", "-h"} & {*argv}:
            doc = sys.modules[define.__module__].__doc__ or ""
            print(usage.describe(doc, values, needs_config))
            raise SystemExit(0)
    if needs_config:
        argv = _config_first(list(argv))
        config_flags.DEFINE_config_file(
            "config", None, "", flag_values=values, sys_argv=["", *argv]
        )
    try:
        rest = values([sys.argv[0], *argv])
    except UserError:
        raise
    except Exception as e:  # whatever a config file may do
        raise UserError(faults.tell(e, argv, values)) from e
    if words:
        flags.DEFINE_list("words", [], "", flag_values=values)
        values.mark_as_parsed()
        values["words"].value = rest[1:]
    elif len(rest) > 1:
        raise UserError(f"{rest[1]!r} is no flag: write --name=value")
    if needs_config:
        if values.config is None:
            raise UserError("--config is missing, for instance --config=bert.py:mini")
        overrides = config_flags.get_override_values(values["config"])
        lacking = sorted(flatten(base()).keys() - flatten(values.config).keys())
        if lacking:
            raise UserError(f"the config file: it lacks {', '.join(lacking[:5])}")
        settle_durations(values.config, overrides)
        from bertjax.disk import follow_init_from  # which needs this module
        from bertjax.tasks import prepare as tasks

        tasks.settle(values.config, overrides)
        follow_init_from(values.config, overrides)
        flags.DEFINE_string("overrides", json.dumps(overrides), "", flag_values=values)
        values.mark_as_parsed()
    return values


def config_arguments(argv: Sequence[str]) -> list[str]:
    """Return the arguments that name a config and change its keys.

    >>> config_arguments(["--seeds=3", "--config", "a.py", "--config.seed=1"])
    ['--config', 'a.py', '--config.seed=1']
    """
    return part_arguments(argv)[0]


def part_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the arguments into config_arguments and the others.

    >>> part_arguments(["--config.data.packed", "--n", "3", "--config.seed", "-3"])
    (['--config.data.packed', '--config.seed', '-3'], ['--n', '3'])
    """
    own: list[str] = []
    others: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if re.match(r"--?config(?![^=.])", word):
            own.append(word)
            if "=" not in word and rest and not re.match("-+[a-z]", rest[0]):
                own.append(rest.pop(0))
        else:
            others.append(word)
    return own, others


def _config_first(argv: list[str]) -> list[str]:
    """Put --config=FILE before its overrides, and whole numbers as absl takes them."""
    first, rest = [], []
    while argv:
        arg = argv.pop(0)
        if re.fullmatch("--?config", arg) and argv:
            arg = f"--config={argv.pop(0)}"
        if match := re.fullmatch(r"--?config=(.*)", arg):
            first = [f"--config={find_config(match[1])}"]
            continue
        match = re.fullmatch(r"(--?config\.[\w.]+=)(\d+\.?\d*[eE]\+?\d+)", arg)
        if match and float(match[2]).is_integer():
            arg = f"{match[1]}{int(float(match[2]))}"
        rest.append(arg)
    return first + rest


def durations(config: ConfigDict, prefix: str = "") -> dict[str, ConfigDict]:
    """Find every duration of a config by its dotted name."""
    found = {}
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            if set(UNITS) <= set(value):
                found[prefix + key] = value
            else:
                found.update(durations(value, f"{prefix}{key}."))
    return found


def settle_durations(config: ConfigDict, overrides: Mapping[str, Any]) -> None:
    """Let a unit given on the command line clear the others; two are an error."""
    for name, value in durations(config).items():
        given = [u for u in UNITS if f"{name}.{u}" in overrides]
        if given:
            for unit in UNITS:
                if unit not in given:
                    value[unit] = None
        units = [u for u in UNITS if value[u] is not None]
        if len(units) != 1:
            what = " and ".join(units) or "nothing"
            raise UserError(f"{name} needs one of {', '.join(UNITS)}; it has {what}")
        if not 0 <= value[units[0]] < 1e18:
            raise UserError(f"{name}.{units[0]}={value[units[0]]} is no length of time")


def unit_of(config: ConfigDict, name: str) -> tuple[str, float]:
    """Return the one unit of a settled duration and its number."""
    value = durations(config)[name]
    unit = next(u for u in UNITS if value[u] is not None)
    return unit, value[unit]


def steps(config: ConfigDict, name: str, first: Any, total: int) -> int:
    """Convert a duration to steps, rounded up; percent is of the `total` steps.

    Where the batch changes in mid-run, examples, tokens (slots, padding included) and
    epochs are those of the `first` phase (bertjax/data/phases.py).
    """
    unit, number = unit_of(config, name)
    a_step = {
        "steps": 1.0,
        "percent": 100 / max(total, 1),
        "examples": first.batch_size,
        "tokens": first.batch_size * first.length,
        "epochs": first.batch_size / first.n,
    }[unit]
    return math.ceil(number / a_step - 1e-9)


# ---------------------------------------------------------------- using configs
def encoder_config(
    config: ConfigDict, vocab_size: int, backend: str = "cpu"
) -> EncoderConfig:
    """Build the encoder's config; `vocab_size` is the tokenizer's.

    A larger model.vocab_size is padding, which is never predicted unless model.pieces
    says so; a smaller one is refused. `backend` (jax's
    default_backend()) decides what dtype="auto" is.
    """
    given = {k: v for k, v in config.model.items() if v is not None}
    family = registry.pick("model.family", given.pop("family"), FAMILIES)
    name, size = given.pop("size", ""), {}
    if name or not SPELLED <= given.keys():  # else its shape is no size of the family
        size = registry.pick("model.size", name, family.sizes)
    shape = {**family.fixed, **size, **given}
    shape.setdefault("intermediate_size", 4 * shape["hidden_size"])
    if shape.setdefault("vocab_size", vocab_size) < vocab_size:
        raise UserError(
            f"model.vocab_size={shape['vocab_size']} is smaller than the tokenizer's "
            f"{vocab_size} pieces: token ids would be >= vocab_size"
        )
    padded = shape["vocab_size"] > vocab_size
    if 0 < shape.setdefault("pieces", vocab_size if padded else 0) < vocab_size:
        raise UserError(
            f"model.pieces={shape['pieces']} is smaller than the tokenizer's "
            f"{vocab_size}: leave it empty"
        )
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if backend == "cpu" else "bfloat16"
    # A loop over the layers compiles in a minute and keeps matrix products alone.
    # Layers one after the other are a fifth faster on a TPU (docs/benchmarks.md), and
    # compile the longer the more. On a CPU recomputing costs more than memory does.
    if backend != "cpu":
        unrolled = backend == "tpu" and shape["num_hidden_layers"] <= 12
        defaults = {"unroll": 0 if unrolled else 1, "remat": "dots"}
        shape = defaults | {"max_logits_mb": 512} | shape
        shape.setdefault("attention", {"tpu": "tpu"}.get(backend, "gpu"))
    cfg = EncoderConfig(**shape, dtype=dtype)
    longest = max(config.data.length, *(p.length for p in wanted_phases(config)))
    if longest > cfg.max_length:
        raise UserError(
            f"{'data.' if longest == config.data.length else 'phases: '}"
            f"length={longest} is more than "
            f"model.max_position_embeddings={cfg.max_position_embeddings}"
            + f" less model.position_offset={cfg.position_offset}"
            * bool(cfg.position_offset)
        )
    return cfg


def wanted_phases(config: ConfigDict) -> list[phases.Wanted]:
    """Read config.phases; without it, one phase of the config's own values."""
    data = config.data
    return phases.parse_phases(
        config.phases, config.batch_size, data.length, data.mask_rate
    )


def make_masking(config: ConfigDict, rate: float | None = None) -> masking.Masking:
    """Make the masking of data.masking and its refinements, at `rate` where given."""
    data = config.data
    return masking.make_masking(
        data.masking,
        rate=data.mask_rate if rate is None else rate,
        unit=data.mask_unit,
        lengths=data.mask_lengths,
        corruption=data.corruption,
        replacement=data.replacement,
        paper_compat=data.paper_compat,
    )


def check_plan(config: ConfigDict, needs: frozenset[str]) -> None:
    """Refuse an objective that needs what the plan cannot give."""
    labelled = bool(config.task.text)
    if ("labels" in needs) != labelled:
        why = (
            "task.text and task.label say where" if not labelled else "task.* has none"
        )
        what = "learns labels" if not labelled else "learns from text"
        raise UserError(f"objective={config.objective!r} {what}: {why}")
    if pipeline.pair_rule(needs) and config.data.plan != "pairs":
        raise UserError(
            f"objective={config.objective!r} needs sentence pairs: data.plan must be "
            f"pairs, not {config.data.plan!r}"
        )


def set_flags(config: ConfigDict) -> None:
    """Add what `deterministic` asks of XLA to XLA_FLAGS, which jax reads only once.

    So it comes before the first use of a device.
    """
    if config.deterministic:
        chosen = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{chosen} --xla_gpu_deterministic_ops=true"


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


def from_json(text: str) -> ConfigDict:
    """Read a config back; keys of a later version than its own keep their defaults."""
    config = base()
    config.update(config_dict.ConfigDict(json.loads(text)))
    return config


def settled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flat config in which a model's empty keys have their values."""
    part = {k[6:]: v for k, v in config.items() if k.startswith("model.")}
    return {**config, **{f"model.{k}": v for k, v in in_effect(part).items()}}


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys of flat configs that differ in effect, sorted.

    Without those of a model that nobody wrote: of tiny and mini, `model.size` alone.
    """
    whole = [settled(config) for config in configs]

    def differ(key: str, among: Sequence[Mapping[str, Any]]) -> bool:
        return any(one.get(key) != among[0].get(key) for one in among)

    found = [k for k in sorted({k for x in whole for k in x}) if differ(k, whole)]
    given = [key for key in found if differ(key, configs)]
    model = {k for k in found if k.startswith("model.") and not FREE.fullmatch(k)}
    return given if model & {*given} else sorted({*given, *model})


def differences(old: ConfigDict, new: ConfigDict) -> list[str]:
    """List what differs and matters: "optim.lr: 0.0001 -> 0.5"."""
    flat = flatten(old), flatten(new)
    a, b = map(settled, flat)
    keys = [key for key in differing(flat) if not FREE.fullmatch(key)]
    return [f"{key}: {a.get(key)} -> {b.get(key)}" for key in keys]


# ---------------------------------------------------------------- running commands
def say(text: str) -> None:
    """Speak on stderr: stdout belongs to results."""
    print(text, file=sys.stderr, flush=True)


def command(main: Callable[[Sequence[str]], int | None]) -> None:
    """Run a command and leave with its status; a UserError is one line and status 2."""
    try:
        status = main(sys.argv[1:]) or 0
    except UserError as e:
        say(f"error: {e}")
        status = 2
    except RunError as e:
        say(f"error: {e}")
        status = 1
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # head, less and the like have read enough
        status = 0
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of tf.data and of a library import may still run: nothing is left to do.
    os._exit(status)
