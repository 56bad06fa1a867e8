# SPDX-License-Identifier: Apache-2.0
"""Time a config's sizes on this machine, and choose the one for a number of minutes."""

import re
import runpy
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError, counted
from bertjax.assembly import command_line, resolve, validate
from bertjax.checkpoints import manifest
from bertjax.config.arguments import find_config
from bertjax.measuring.measurements import MEASURES
from bertjax.measuring.synthetic_data import of_phase
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.tables import Say

SECONDS = 60.0  # for measuring all sizes together, without compilation
# Choose the largest size that sees so many tokens per parameter of its layers. This is
# a rule of thumb: sizes were not yet compared for the same time (docs/speedrun.md).
TOKENS_A_PARAMETER = 5.0


def read_sizes(file: str) -> list[str]:
    """Return the sizes in a config file's SIZES; [] if it has none."""
    sizes = runpy.run_path(find_config(file)).get("SIZES")
    return [*sizes] if isinstance(sizes, Mapping) else []


def plan_budget(argv: Sequence[str], minutes: float, say: Say) -> dict[str, Any]:
    """Time the config of `argv` in each of its sizes, or in the one that it names.

    Returns {"device", "devices", "minutes", "sizes": [{"config", "layers", "width",
    "length", "batch_size", "parameters", "layer_parameters", "step_seconds", "slots",
    "steps", "has_text", "tokens", "tokens_per_parameter", ...}], "offered": the number
    of sizes, "chosen": an index of sizes}. slots: B x L of a step; has_text: whether
    data.train is given; tokens: of all steps, padding included; parameters: all of
    them, although those of the layers decide. Raises UserError.
    """
    is_file = re.compile("--?config=(.*)")
    file = [m[1] for m in map(is_file.match, argv) if m][-1]  # as absl takes it
    command_line.parse([f"--config={file}"])  # refuses a file with an error in it
    rest = [word for word in argv if not is_file.match(word)]
    name, colon, _ = file.partition(":")
    sizes = [] if colon else read_sizes(name)
    files = [f"{name}:{size}" for size in sizes] or [file]
    found: list[dict[str, Any]] = []
    for one in files:
        config = command_line.parse([f"--config={one}", *rest]).config
        validate.check(config)
        if config.init_from and not manifest.as_path(config.init_from).exists():
            raise UserError(f"init_from={config.init_from}: no such directory")
        resolve.objectives_of(config)  # also refuses a task without columns
        if tasks.is_task(config):
            tasks.check_task(config)
        row = time_config(config, SECONDS / len(files))
        row |= {
            "config": one,
            "has_text": bool(config.data.train),
            "steps": int(60 * minutes / row["step_seconds"]),
        }
        row["tokens"] = row["steps"] * row["slots"]
        row["tokens_per_parameter"] = row["tokens"] / row["layer_parameters"]
        found.append(row)
        say(describe_size(row))
        if row["tokens_per_parameter"] < TOKENS_A_PARAMETER / 4 and len(files) > 1:
            break  # larger sizes see even fewer
    enough = [
        i
        for i, row in enumerate(found)
        if row["tokens_per_parameter"] >= TOKENS_A_PARAMETER
    ]
    facts = {name: found[0][name] for name in ("device", "devices")}
    chosen = (enough or [0])[-1]
    facts |= {"minutes": minutes, "offered": len(files)}
    return {**facts, "sizes": found, "chosen": chosen}


def time_config(config: ConfigDict, seconds: float) -> dict[str, Any]:
    """Time the step of a config: the mean over phases, weighted by their share.

    seconds: to spend on measuring. Returns a row of plan_budget's sizes without the
    values that depend on the minutes; step_seconds and slots are those of a step.
    Raises UserError for phases whose extents are not in percent.
    """
    shares = phase_shares(config)
    planned = resolve.wanted_phases(config)
    step, slots, facts = 0.0, 0.0, {}
    for phase, share in zip(planned, shares, strict=True):
        measured = MEASURES["step"](of_phase(config, phase))
        once = measured.run(2)["step"]
        steps = max(1, int(seconds * share / once))
        step += share * measured.run(steps)["step"]
        slots += share * measured.facts["tokens"]
        facts = measured.facts
    cfg = resolve.encoder_config(config, 1)
    last = planned[-1]
    return {
        "layers": cfg.num_hidden_layers,
        "width": cfg.hidden_size,
        "length": last.length,
        "batch_size": last.batch_size,
        "parameters": facts["parameters"],
        "layer_parameters": layer_parameters(cfg),
        "step_seconds": step,
        "slots": slots,
        "device": facts["device_kind"],
        "devices": facts["devices"],
    }


def layer_parameters(cfg: Any) -> int:
    """Count the weights of the layers' matrices.

    >>> from bertjax.models.config import EncoderConfig
    >>> layer_parameters(EncoderConfig(100, 10, 2, 1, 40))
    2400
    """
    gates = 3 if cfg.mlp_type == "glu" else 2
    one = 4 * cfg.hidden_size**2 + gates * cfg.hidden_size * cfg.intermediate_size
    return cfg.num_hidden_layers * one


def phase_shares(config: ConfigDict) -> list[float]:
    """Return the share of the steps of each phase. Raises UserError."""
    planned = resolve.wanted_phases(config)
    if any(p.unit != "percent" for p in planned[:-1]):
        raise UserError(
            "phases: with --budget_minutes each but the last is said in percent, since "
            "the number of steps is what is looked for"
        )
    shares = [p.extent / 100 for p in planned[:-1]]
    return [*shares, 1 - sum(shares)]


def describe_size(row: dict[str, Any]) -> str:
    """Return the line for a size."""
    return (
        f"{row['config']}: {row['parameters'] / 1e6:.1f} M parameters, "
        f"{counted(row['layers'], 'layer')} of {row['width']}, "
        f"{counted(row['batch_size'], 'row')} of "
        f"{row['length']} tokens, {1e3 * row['step_seconds']:.0f} ms per step: "
        f"{counted(row['steps'], 'step')}, at most {row['tokens'] / 1e6:,.1f} M "
        "tokens, "
        f"{row['tokens_per_parameter']:.1f} a parameter of the layers"
    )


def describe(found: dict[str, Any], rest: Sequence[str]) -> Iterator[str]:
    """Yield lines that report what fits the minutes, and the command for it."""
    sizes, chosen = found["sizes"], found["sizes"][found["chosen"]]
    devices = f"{found['devices']} x {found['device']}"
    minutes = f"{found['minutes']:g} minute{'s' * (found['minutes'] != 1)}"
    yield f"{minutes} on {devices}:"
    yield from (f"  {describe_size(row)}" for row in sizes)
    if found["offered"] > 1:
        least = f"{TOKENS_A_PARAMETER:g} tokens a parameter of the layers"
        enough = chosen["tokens_per_parameter"] >= TOKENS_A_PARAMETER
        yield f"the largest that sees {least}:" if enough else f"none sees {least}:"
    if not chosen["steps"]:
        yield "  not one step fits"
        return
    steps = f"--config.total.steps={chosen['steps']}"
    text = [] if chosen["has_text"] else ["--config.data.train=FILES"]
    command = [f"--config={chosen['config']}", *rest, *text, steps, "--workdir=DIR"]
    yield f"  python -m bertjax.train {shlex.join(command)}"
