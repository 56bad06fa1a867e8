# SPDX-License-Identifier: Apache-2.0
"""Describe in one line what is wrong with a command's flags or its config file."""

import os
import re
import traceback
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, registry
from bertjax.config.arguments import load_config
from bertjax.config.durations import UNITS, durations
from bertjax.config.schema import base
from bertjax.config.serialize import flatten

# Our keys and flags -> their names in Hugging Face, T5X, fairseq and Google's BERT.
# After a semicolon: what our number means where theirs means something else.
OURS = {
    "optim.lr": "learning_rate peak_learning_rate",
    "optim.wd": "weight_decay",
    "optim.b1": "adam_beta1",
    "optim.b2": "adam_beta2",
    "optim.eps": "adam_epsilon adam_eps",
    "optim.clip": "max_grad_norm clip_norm",
    "optim.name": "optimizer",
    "optim.schedule": "lr_scheduler lr_scheduler_type",
    "optim.warmup.steps": "warmup_steps num_warmup_steps warmup_updates",
    "optim.warmup.percent; a share of 0.1 is 10 here": "warmup_ratio warmup_proportion",
    "total.epochs": "epochs num_epochs num_train_epochs max_epoch",
    "total.steps": "steps max_steps num_train_steps train_steps max_update",
    "data.length": "max_length max_seq_len max_seq_length seq_length tokens_per_sample",
    "batch_size; of all devices together": (
        "per_device_train_batch_size train_batch_size"
    ),
    "accumulate; batch_size stays what a step sees": (
        "gradient_accumulation_steps update_freq"
    ),
    "data.mask_rate": "mlm_probability mask_prob masked_lm_prob",
    "data.max_predictions": "max_predictions_per_seq",
    "model.hidden_dropout_prob": "hidden_dropout dropout",
    "model.attention_probs_dropout_prob": "attention_dropout",
    "data.train": "train_file input_file",
    "data.valid": "validation_file",
    "data.vocab": "vocab_file tokenizer_name",
    "data.lower_case": "do_lower_case",
    "task.name": "task_name",
    "init_from": "model_name_or_path model init_checkpoint",
    "dtype; bfloat16, or float32": "bf16 fp16",
    "log.every.steps": "logging_steps log_interval",
    "eval.every.steps": "eval_steps",
    "checkpoint.every.steps": "save_steps save_interval_updates",
    "checkpoint.keep_last": "save_total_limit",
    "log.writers": "report_to",
    "--workdir": "output_dir save_dir model_dir",
}
OURS = {theirs: key for key, names in OURS.items() for theirs in names.split()}
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def explain(error: Exception, argv: Sequence[str], values: flags.FlagValues) -> str:
    """Name the faulty flag, or FILE:LINE of the config; values: the known flags."""
    given = (a.split("=", 1)[1] for a in argv if re.match("--?config=", a))
    config = next(given, "")
    file = config.partition(":")[0]
    path = os.path.abspath(file)
    causes = [error]
    while causes[0].__context__ is not None:
        causes.insert(0, causes[0].__context__)
    for cause in causes:
        frames = traceback.extract_tb(cause.__traceback__)
        lines = [x.lineno for x in frames if os.path.abspath(x.filename) == path]
        if lines:
            kind = "" if isinstance(cause, UserError) else f"{type(cause).__name__}: "
            return f"{file}:{lines[-1]}: {kind}{_line(cause)}"
    if isinstance(error, UserError):
        return str(error)
    dotted = any(re.match(r"--?config\.", a) for a in argv)
    if not config and dotted and "config" in values:
        return "--config is missing, for instance --config=bert.py:mini"
    try:
        if config:
            load_config(config)
    except UserError as e:
        return _line(e)
    except Exception:  # the file is not at fault, as its lines show
        pass
    if isinstance(error, (AttributeError, KeyError)):
        return _unknown_key(error, argv)
    if isinstance(error, flags.UnrecognizedFlagError):
        name, own = error.flagname, [x for x in values if not x.startswith("config.")]
        arg = next((a for a in argv if a.lstrip("-").partition("=")[0] == name), "")
        hint = suggest(name, arg.partition("=")[2]) if "config" in values else ""
        return f"--{name} is unknown{hint or registry.hint(name, own)}"
    if isinstance(error, flags.IllegalFlagValueError):
        return _wrong_value(error, values)
    if isinstance(error, (flags.Error, TypeError, ValueError, OSError)):
        return _line(error)
    return f"the config file: {type(error).__name__}: {_line(error)}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _unknown_key(error: Exception, argv: Sequence[str]) -> str:
    """Name the flag with an unknown key, and the known keys at that level."""
    for arg in argv:
        flag, _, value = arg.partition("=")
        command, *names = flag.lstrip("-").split(".")
        known: Any = base()
        for i, name in enumerate(names if command == "config" else ()):
            if not isinstance(known, ConfigDict):
                key = ".".join(names[:i])
                return f"{flag} is unknown: {key} is a single value, without keys"
            if name not in known:
                hint = suggest(names[-1], value) or registry.hint(name, known)
                return f"{flag} is unknown{hint}"
            known = known[name]
    return f"the config file: {_line(error)}"


def suggest(name: str, value: str = "") -> str:
    """Suggest our key for another library's name or a key's last part, or return "".

    >>> suggest("num_train_epochs", "3")
    '; did you mean --config.total.epochs=3?'
    """
    name, lasting = name.lower(), durations(base()).keys()
    key, _, note = OURS.get(name, "").partition("; ")
    if not key:
        known = {k for k in flatten(base()) if k.rpartition(".")[0] not in lasting}
        keys = [k for k in known | lasting if f".{k}".endswith(f".{name}")]
        key = keys[0] if len(keys) == 1 else ""
    if not key:
        return ""
    flag = key if key.startswith("--") else f"--config.{key}"
    if key in lasting:
        return f"; did you mean {duration_flag(flag, value)}?"
    if note or not value:
        return f"; did you mean {flag}?" + f" ({note})" * bool(note)
    return f"; did you mean {flag}={value}?"


def duration_flag(flag: str, value: str) -> str:
    """Write a duration flag with a unit, and name the other units."""
    number = value if re.fullmatch(r"[\d.]+", value) else "N"
    others = ", ".join(f".{unit}" for unit in [*UNITS][1:])
    return f"{flag}.steps={number}, or {others} for .steps"


def _wrong_value(error: Exception, values: flags.FlagValues) -> str:
    """Say what kind of value a flag expects; a duration or a group expects none."""
    line = _line(error)
    match = re.match(r"flag --([\w.]+)=(.*?): ", line)
    if not match:
        return line
    name, value = match.groups()
    flag, key = f"--{name}={value}", name.removeprefix("config.")
    known: Any = base()
    for part in key.split("."):
        known = known.get(part) if isinstance(known, ConfigDict) else None
    if name != key and isinstance(known, ConfigDict):
        if key in durations(base()):
            return f"{flag}: write {duration_flag(f'--{name}', value)}"
        whole = f": write --{name}.name={value}" if "name" in known else ""
        return f"{flag}: {key} is a group of keys{whole}; known: {', '.join(known)}"
    kind = KINDS.get(values[name].flag_type(), "")
    if kind and re.search("invalid literal|could not convert|Non-boolean", line):
        what = f": {values[name].help}" * (name == key)  # a command's own flag
        return f"{flag}: {value!r} is not {kind}{what}"
    # absl omits the article: "2 is not integer >= 3".
    return line.removeprefix("flag ").replace(" is not integer", " is not an integer")
