# SPDX-License-Identifier: Apache-2.0
"""Refuse configs whose faults show without data and without jax."""

import os

from ml_collections.config_dict import ConfigDict

from bertjax import UserError, registry
from bertjax.assembly import resolve
from bertjax.assembly.init_layers import read_layers
from bertjax.config import durations, schema, serialize
from bertjax.data import mixture
from bertjax.data.features.base import KEYS
from bertjax.data.features.noise_operations import read_noise
from bertjax.data.masking import mask_rates
from bertjax.data.masking.masker import read_masker
from bertjax.data.masking.similar_words import NONE
from bertjax.data.sequences import make_plan
from bertjax.data.tokenizers import train_vocab
from bertjax.data.tokenizers.stream_vocab import read_streams
from bertjax.objectives import SUPPORT
from bertjax.objectives import parse as parse_objective
from bertjax.tasks import prepare_task as tasks
from bertjax.training import (
    CHOICES,
    read_freeze,
    read_keep_zeros,
    read_rates,
    settings_of,
    writer,
)

# Keys of running text. Labeled rows are not masked, sampled or cut from a text.
OF_TEXT = (
    "masking mask_rate mask_unit mask_lengths corruption replacement similar "
    "mask_weights swap concept control plan noise max_predictions paper_compat "
    "short_seq_prob text_field group_field entity_field code_field streams segmenter "
    "target_length extra_ids"
)
OF_TEXT = [*(f"data.{key}" for key in OF_TEXT.split()), "eval.mask_rate"]

# Bounds of values, inclusive. A key whose default is None may also be None.
RANGES = {
    "seed": (0, 2**31 - 1),
    "batch_size": (1, 2**20),
    "accumulate": (1, 2**20),
    "steps_per_call": (1, 2**10),
    "data.length": (8, 2**16),
    "data.short_seq_prob": (0, 1),
    "data.max_line_bytes": (1, 2**40),
    "data.max_segments": (1, 2**16),
    "data.target_length": (4, 2**16),
    "data.vocab_size": (train_vocab.LEAST, 2**24),
    "data.extra_ids": (0, 2**16),
    "data.alpha": (0, 1),
    "data.vocab_alpha": (0, 1),
    "task.temperature": (1e-6, 1e6),
    "task.negatives": (0, 2**10),
    "task.candidates": (2, 2**16),
    "task.passages": (1, 2**10),
    "task.chunks": (1, 2**20),
    "task.margin_weight": (0, 1),
    "task.active": (1, 2**20),
    "task.query_flops": (0, 1e6),
    "task.passage_flops": (0, 1e6),
    "task.embedding_size": (1, 2**16),
    "task.stride": (1, 2**16),
    "task.question_length": (1, 2**16),
    "task.answer_length": (1, 2**16),
    "task.target_length": (1, 2**16),
    "task.num_beams": (1, 2**10),
    "task.length_penalty": (-100, 100),
    "task.paths": (1, 3),
    "task.answers": (1, 2**12),
    "task.disambiguate": (0, 2**16),
    "task.max_regions": (1, 2**12),
    "task.region_size": (1, 2**16),
    "task.region_classes": (0, 2**16),
    "task.region_mask_rate": (1e-6, 1),
    "optim.lr": (0, 3e38),
    "optim.wd": (0, 3e38),
    "optim.b1": (0, 1 - 1e-9),
    "optim.b2": (0, 1 - 1e-9),
    "optim.eps": (0, 1),
    "optim.clip": (0, 3e38),
    "optim.layer_decay": (0, 1),
    "optim.power": (0, 100),
    "optim.ema": (0, 1 - 1e-9),
    "guard.factor": (0, 3e38),
    "guard.patience": (1, 2**31 - 1),
    "guard.rewinds": (0, 2**31 - 1),
    "budget_minutes": (1e-6, 1e9),
    "eval.examples": (0, 2**62),
    "eval.patience": (1, 2**31 - 1),
    "hosts.timeout": (2, 86_400),
    "checkpoint.keep_every": (1, 2**62),
    "profile.start": (0, 2**62),
    "profile.steps": (0, 2**20),
}


def _unread(config: ConfigDict) -> list[str]:
    """Return the keys of running text that the rows of a config do not use."""
    if not config.task.text:
        return []
    masks = {"eval.mask_rate", *(f"data.{key}" for key in KEYS)}
    task_type = tasks.shipped_task_type(config.objective)
    own = masks if task_type and task_type.masks else ()
    return [key for key in OF_TEXT if key not in own]


def check(config: ConfigDict) -> None:
    """Refuse a config whose faults show without data and without jax."""
    for part in parse_objective(config.objective):
        registry.check_module("objective", part.name, "bertjax.objectives", SUPPORT)
    registry.pick("data.engine", config.data.engine, dict.fromkeys(("tf", "python")))
    flat = serialize.flatten(config)
    for key, ends in RANGES.items():
        _check_range(key, flat[key], *ends)
    _check_run(config)
    tasks.check_settings(config, schema.base().task)
    defaults = serialize.flatten(schema.base())
    for key in _unread(config):
        if flat[key] not in (defaults[key], ""):
            raise UserError(
                f"{key}={flat[key]} is for running text, and rows of a task do not use "
                "it: leave it out"
            )
    _check_optimizer(config)
    _check_budget(config)
    _check_phases(config)
    _check_data(config)
    resolve.encoder_config(config, vocab_size=1)
    registry.pick("data.plan", config.data.plan, make_plan.KINDS)
    for name in registry.split_list(config.log.writers):
        writer.find_writer(name)


def _check_range(key: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:
        raise UserError(f"{key}={value} must be from {least} to {most}")


def _check_run(config: ConfigDict) -> None:
    if config.checkpoint.keep_last < 2:
        raise UserError(
            f"checkpoint.keep_last={config.checkpoint.keep_last} must be at least 2: a "
            "damaged newest checkpoint needs one before it"
        )
    unit, length = durations.unit_of(config, "total")
    if unit == "percent":
        raise UserError(
            "total.percent has no meaning, since total is the whole: give total.steps, "
            ".epochs, .examples or .tokens"
        )
    if not length:
        raise UserError(f"total.{unit}={length}: a run needs at least one step")
    for name in ("optim.warmup", "optim.decay", "optim.average"):
        unit, length = durations.unit_of(config, name)
        if unit == "percent" and length > 100:
            raise UserError(
                f"{name}.percent={length:g} is more than the whole run: give 100 or "
                "less, for instance 10"
            )
    for name in ("log.every", "eval.every", "checkpoint.every"):
        unit, length = durations.unit_of(config, name)
        if not length:
            never = "; without data.valid nothing is evaluated" * (name == "eval.every")
            raise UserError(
                f"{name}.{unit}={length}: it is at least a step, and a number beyond "
                f"total's means never but at the end{never}"
            )
    policies = dict.fromkeys(("skip", "stop"))
    registry.pick("guard.nonfinite", config.guard.nonfinite, policies)
    if 0 < config.guard.factor < 1:
        raise UserError(
            f"guard.factor={config.guard.factor} would skip gradients below their "
            "mean: give 1 or more, or 0 to skip none"
        )
    if config.init_layers:
        read_layers(config.init_layers)
    if (config.eval.best or config.eval.patience) and not config.data.valid:
        key = "best" if config.eval.best else "patience"
        raise UserError(
            f"eval.{key}={config.eval[key]} needs evaluations, but data.valid is "
            f"empty: give data.valid, or leave eval.{key} out"
        )


def _check_optimizer(config: ConfigDict) -> None:
    read_rates(config.optim.rates)
    read_freeze(config.optim.freeze)
    read_keep_zeros(config.optim.keep_zeros)
    dtypes = dict.fromkeys(("float32", "bfloat16", "fast"))
    registry.pick("optim.ns_dtype", config.optim.ns_dtype, dtypes)
    unit, length = durations.unit_of(config, "optim.average")
    if config.optim.ema and length:
        raise UserError(
            f"optim.ema={config.optim.ema} and optim.average.{unit}={length} are both "
            "given, and a run keeps one average: give one of them"
        )
    flat = serialize.flatten(config.optim)
    defaults = serialize.flatten(schema.base().optim)
    defaults["power"] = schema.power_in_effect(config.optim.schedule, None)
    for choice, (known, _) in CHOICES.items():
        name = config.optim[choice.removeprefix("optim.")]
        read = settings_of(choice, name)
        unread = {key for keys in known.values() for key in keys} - {*read}
        for key, value in flat.items():
            setting = key.partition(".")[0]  # of a duration such as optim.decay.steps
            if setting in unread and value not in (defaults[key], None):
                users = [user for user, keys in known.items() if setting in keys]
                default = defaults[key]
                instead = (
                    f", or where the config file has it give --config.optim.{key}="
                    f"{default}"
                ) * (default is not None)
                raise UserError(
                    f"optim.{key}={value} is not used by {choice}={name}, only by "
                    f"{', '.join(users)}: leave it out{instead}"
                )
    if config.optim.name in CHOICES["optim.name"][0]:
        # With 0, a parameter without a gradient would become nan.
        _check_range("optim.eps", config.optim.eps, 1e-30, 1)


def _check_budget(config: ConfigDict) -> None:
    registry.pick("budget_clock", config.budget_clock, {"wall": 0, "cpu": 0})
    if config.budget_minutes is None:
        if config.budget_clock != "wall":
            raise UserError(
                f"budget_clock={config.budget_clock} measures budget_minutes, which "
                "is not given: give it, or leave budget_clock out"
            )
        return
    if config.steps_per_call != 1:
        raise UserError(
            f"steps_per_call={config.steps_per_call} cannot be used with "
            "budget_minutes, which times each update by itself: leave it out"
        )
    for name in ("optim.warmup", "optim.decay", "optim.average"):
        unit, _ = durations.unit_of(config, name)
        if unit != "percent":
            raise UserError(
                f"{name}.{unit} cannot be used with budget_minutes, where the "
                f"schedule follows the clock: give {name}.percent"
            )
    counts = "log.every", "eval.every", "checkpoint.every"
    units = {name: durations.unit_of(config, name)[0] for name in counts}
    wrong = [f"{name}.percent" for name in counts if units[name] == "percent"]
    if any(p.unit == "percent" for p in resolve.wanted_phases(config)):
        wrong.append("phases: percent")
    if wrong:
        raise UserError(
            f"{', '.join(wrong)} cannot be used with budget_minutes, since the number "
            "of steps is unknown: give steps"
        )


def _check_phases(config: ConfigDict) -> None:
    planned = resolve.wanted_phases(config)
    mask_rates.read(config.data.mask_rate)
    mask_rates.read(config.eval.mask_rate, "eval.mask_rate")
    for phase in planned:
        mask_rates.read(phase.mask_rate, "phases: mask_rate")
        _check_range("phases: length", phase.length, *RANGES["data.length"])
        _check_range("phases: batch_size", phase.batch_size, *RANGES["batch_size"])
    longest = max(p.length for p in planned)
    _check_range("data.max_predictions", config.data.max_predictions, 1, longest)


def _check_data(config: ConfigDict) -> None:
    data = config.data
    if not data.cache:
        raise UserError("data.cache is empty: give a directory for token stores")
    if data.max_segments is not None and not data.packed:
        raise UserError(
            f"data.max_segments={data.max_segments} is not used without data.packed: "
            "leave it out, or give data.packed=True"
        )
    mixture.read_weights(data.weights)
    read_noise(data.noise)
    read_streams(data.streams)
    if data.target_length is not None and data.plan != "turns":
        raise UserError(
            f"data.target_length={data.target_length} needs data.plan=turns, and this "
            f"is {data.plan}: leave it out"
        )
    if data.weights and data.alpha is not None:
        raise UserError("data.weights and data.alpha are both given: give one of them")
    chosen = read_masker(data, mask_rates.last(data.mask_rate))
    similar = getattr(chosen, "similar", False)  # a plug-in's masker has none
    if data.similar and not similar:
        raise UserError(
            f"data.similar={data.similar} is not used by data.masking={data.masking}, "
            "only by macbert: leave it out, or where the config file has it give "
            "--config.data.similar="
        )
    if data.swap and registry.is_outside(data.masking):
        raise UserError(
            f"data.swap={data.swap} goes with presets, not with data.masking="
            f"{data.masking}: leave one of them out"
        )
    for key in ("similar", "mask_weights", "swap"):
        name = data[key]
        if name not in ("", NONE) and not os.path.isfile(os.path.expanduser(name)):
            what = "is a directory" if os.path.isdir(name) else "does not exist"
            raise UserError(f"data.{key}={name} {what}: give a file")
    if getattr(chosen, "unit", None) == "entity" and not data.entity_field:
        raise UserError(
            "data.mask_unit=entity needs the field with the names: give "
            "data.entity_field"
        )
