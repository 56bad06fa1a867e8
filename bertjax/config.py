# SPDX-License-Identifier: Apache-2.0
"""From the command line to a resolved config: files, overrides, durations, checks.

Nothing here imports jax: what is wrong with a config is said before that.
"""

import dataclasses
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
from ml_collections.config_dict import ConfigDict, placeholder

from bertjax import RunError, UserError, registry
from bertjax.data import masking, plan
from bertjax.models.config import SIZES, EncoderConfig
from bertjax.objectives import SUPPORT
from bertjax.training import manifest, workdir, writer

UNITS = {
    "steps": int,
    "epochs": float,
    "examples": int,
    "tokens": int,
    "percent": float,
}
# What may differ between a workdir's config and the command's: where and how, not
# what. Data is compared by content (run.json), not by the spelling of its path.
FREE = re.compile(
    r"(log|checkpoint|profile|mesh)\..*|eval\.every\..*"
    r"|data\.(engine|cache|train|valid|vocab)"
)

# What a value may be, ends included; where None means a default it may be that too.
RANGES = {
    "seed": (0, 2**31 - 1),
    "batch_size": (1, 2**20),
    "accumulate": (1, 2**20),
    "data.length": (8, 2**16),
    "data.short_seq_prob": (0, 1),
    "data.max_line_bytes": (1, 2**40),
    "model.layer_norm_eps": (1e-15, 1),
    "model.initializer_range": (0, 10),
    "optim.lr": (0, 3e38),
    "optim.wd": (0, 3e38),
    "optim.b1": (0, 1 - 1e-9),
    "optim.b2": (0, 1 - 1e-9),
    "optim.eps": (0, 1),
    "optim.clip": (0, 3e38),
    "eval.examples": (0, 2**62),
    "checkpoint.keep_every": (1, 2**62),
}


# ---------------------------------------------------------------- writing configs
def duration(**given: float) -> ConfigDict:
    """Make a duration: one of steps, epochs, examples, tokens, percent (of the run)."""
    return ConfigDict(
        {u: t(given[u]) if u in given else placeholder(t) for u, t in UNITS.items()}
    )


def base() -> ConfigDict:
    """Return every key a config has, with defaults; configs/*.py change what differs.

    Model sizes are Hugging Face's names; those left empty follow `model.size`.
    """
    return ConfigDict(
        dict(
            seed=0,
            objective="mlm",
            batch_size=256,  # sequences a step, over all devices and accumulation
            accumulate=1,  # micro-batches a step
            dtype="auto",  # of the computation: float32 on CPU, else bfloat16
            init_from="",  # another run's workdir or checkpoint: its parameters
            deterministic=False,  # on GPU: bit-equal repetition, at a cost in speed
            total=duration(steps=100_000),
            model=dict(
                size="base",
                **{
                    f.name: placeholder(f.type)
                    for f in dataclasses.fields(EncoderConfig)
                    if f.name not in ("dtype", "pooler")
                },
            ),
            data=dict(
                train="",  # files, globs, tfds:name:split, builtin:docs; with commas
                valid="",  # the same, or named: wiki=a.txt,novels=b.txt
                cache="~/.cache/bertjax",  # where token stores lie
                vocab="",  # empty: one is trained
                vocab_size=32_768,  # of a trained one
                tokenizer="unigram",  # of a trained one: or bpe, wordpiece, byte_bpe
                lower_case=placeholder(bool),  # empty: what the tokenizer's files say
                length=128,
                engine="tf",  # or python: the same batches without TensorFlow
                plan="pairs",  # or full_sentences, doc_sentences
                short_seq_prob=0.1,  # pairs: share of documents with short targets
                masking="bert",  # a preset, refined by the next keys
                mask_rate=placeholder(float),
                mask_unit=placeholder(str),  # token, word
                replacement=placeholder(str),  # uniform, unigram
                max_predictions=placeholder(int),  # empty: ceil(rate x length)
                paper_compat=False,  # the official code's quirks with special tokens
                max_line_bytes=64 * 2**20,
            ),
            optim=dict(
                name="adamw",
                lr=1e-4,
                wd=0.01,
                b1=0.9,
                b2=0.999,
                eps=1e-6,
                clip=1.0,  # global norm; 0: none
                warmup=duration(percent=1),
                schedule="linear",  # to 0 at the end; or constant
            ),
            mesh=dict(data=-1, fsdp=1, tensor=1),
            log=dict(every=duration(steps=50), writers="jsonl,tensorboard"),
            eval=dict(
                every=duration(percent=10),
                examples=2048,  # a fixed subset of each validation set; 0: all
            ),
            checkpoint=dict(
                every=duration(percent=5),
                keep_last=2,
                keep_every=placeholder(int),  # every m-th step is kept for ever
            ),
        )
    )


def read_arg(arg: str | None, size: str) -> tuple[str, bool]:
    """Read a config's ARG ("mini", "smoke", "mini,smoke"): (size, whether smoke)."""
    words = [w for w in (arg or "").split(",") if w]
    for word in words:
        if word != "smoke" and word not in SIZES:
            raise registry.unknown("the config's ARG", word, [*SIZES, "smoke"])
    smoke = "smoke" in words
    given = [w for w in words if w in SIZES]
    return (given or ["tiny" if smoke else size])[-1], smoke


def make_smoke(config: ConfigDict) -> ConfigDict:
    """Shrink a config to seconds on a laptop; everything stays overridable."""
    config.batch_size = 8
    config.dtype = "float32"
    config.total = duration(steps=20)
    config.data.length = 64
    config.data.engine = "python"
    config.data.vocab_size = 2048
    config.data.train = config.data.valid = "builtin:docs"
    config.optim.lr = 1e-3
    config.optim.warmup = duration(steps=2)
    config.log.every = duration(steps=1)
    config.eval.every = duration(steps=10)
    config.eval.examples = 64
    config.checkpoint.every = duration(steps=10)
    return config


# ---------------------------------------------------------------- reading commands
def find_config(path: str) -> str:
    """Return the file of "configs/x.py:ARG", or of a name shipped in the package.

    Raises UserError when there is none.
    """
    file, colon, arg = path.partition(":")
    package = Path(__file__).parent
    shipped = (package / "configs", package.parent / "configs")
    for folder in (Path(), *shipped):
        if (folder / file).is_file():
            return f"{folder / file}{colon}{arg}"
    known = [p.name for d in shipped for p in d.glob("*.py") if p.stem != "__init__"]
    raise registry.unknown("--config", file, known)


def parse(
    argv: Sequence[str],
    define: Callable[[flags.FlagValues], None] | None = None,
    needs_config: bool = True,
    words: bool = False,
) -> flags.FlagValues:
    """Read a command's flags; `define` adds the command's own.

    With `words` the rest of the line is in the result's `words`. The result's `config`
    is the resolved ConfigDict (durations with one unit each) and `overrides` what the
    command line changed. Raises UserError in one line.
    """
    values = flags.FlagValues()
    if define:
        define(values)
    if needs_config:
        argv = _config_first(list(argv))
        config_flags.DEFINE_config_file(
            "config", None, "", flag_values=values, sys_argv=["", *argv]
        )
    try:
        rest = values([sys.argv[0], *argv])
    except UserError:
        raise
    except (AttributeError, KeyError) as e:
        raise UserError(_unknown_key(e, argv)) from e
    except (flags.Error, TypeError, ValueError, OSError) as e:
        raise UserError(" ".join(str(e).split())) from e
    except Exception as e:  # whatever a config file may do
        said = " ".join(str(e).split())
        raise UserError(f"the config file: {type(e).__name__}: {said}") from e
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
        flags.DEFINE_string("overrides", json.dumps(overrides), "", flag_values=values)
        values.mark_as_parsed()
    return values


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


def _unknown_key(error: Exception, argv: Sequence[str]) -> str:
    """Name the flag behind ml_collections' "'lrr' Did you mean ...", in one line."""
    said = str(error.args[0] if error.args else error)
    said = " ".join(said.replace("\\n", " ").replace("\\'", "'").split())
    name = re.search(r"'(\w+)'", said)
    flag = next((a for a in argv if name and name[1] in a.split("=")[0]), "the config")
    hint = re.search(r"Did you mean .*\"", said.rstrip("'"))
    return f"{flag.split('=')[0]} is unknown" + (f": {hint[0]}" if hint else "")


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


def steps(
    config: ConfigDict, name: str, examples: int | None, total: int | None = None
) -> int:
    """Convert a duration to steps, rounded up.

    A duration in tokens counts batch_size x data.length slots a step; epochs need
    the number of `examples`, percent the `total` steps.
    """
    value = durations(config)[name]
    unit = next(u for u in UNITS if value[u] is not None)
    number, batch = value[unit], config.batch_size
    if unit == "epochs" and examples is None:
        raise UserError(f"{name} in epochs needs data")
    if unit == "percent" and total is None:
        raise UserError(f"{name}.percent: there is no whole to take a share of")
    exact = {
        "steps": lambda: number,
        "epochs": lambda: number * examples / batch,
        "examples": lambda: number / batch,
        "tokens": lambda: number / (batch * config.data.length),
        "percent": lambda: number * total / 100,
    }[unit]()
    return math.ceil(exact - 1e-9)


# ---------------------------------------------------------------- using configs
def encoder_config(
    config: ConfigDict, vocab_size: int, backend: str = "cpu"
) -> EncoderConfig:
    """Build the encoder's config; `vocab_size` is the tokenizer's.

    A larger model.vocab_size is padding, a smaller one is refused. `backend` (jax's
    default_backend()) decides what dtype="auto" is.
    """
    given = {k: v for k, v in config.model.items() if v is not None}
    shape = dict(registry.pick("model.size", given.pop("size"), SIZES))
    shape.update(given)
    shape.setdefault("intermediate_size", 4 * shape["hidden_size"])
    if shape.setdefault("vocab_size", vocab_size) < vocab_size:
        raise UserError(
            f"model.vocab_size={shape['vocab_size']} is smaller than the tokenizer's "
            f"{vocab_size} pieces: token ids would be >= vocab_size"
        )
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if backend == "cpu" else "bfloat16"
    cfg = EncoderConfig(**shape, dtype=dtype)
    if config.data.length > cfg.max_position_embeddings:
        raise UserError(
            f"data.length={config.data.length} is more than "
            f"model.max_position_embeddings={cfg.max_position_embeddings}"
        )
    return cfg


def check(config: ConfigDict) -> None:
    """Refuse what can be seen to be wrong without data and without jax."""
    for part in config.objective.split("+"):
        registry.check_module("objective", part, "bertjax.objectives", SUPPORT)
    registry.pick("data.engine", config.data.engine, dict.fromkeys(("tf", "python")))
    flat = flatten(config)
    for key, (least, most) in RANGES.items():
        if flat[key] is not None and not least <= flat[key] <= most:
            raise UserError(f"{key}={flat[key]} is not in [{least}, {most}]")
    if config.checkpoint.keep_last < 2:
        raise UserError(
            f"checkpoint.keep_last={config.checkpoint.keep_last} is less than 2: a "
            "damaged newest checkpoint needs one before it"
        )
    most = config.data.max_predictions
    if most is not None and not 0 < most <= config.data.length:
        raise UserError(f"data.max_predictions={most} is not in [1, data.length]")
    encoder_config(config, vocab_size=1)
    make_masking(config)
    registry.pick("data.plan", config.data.plan, plan.KINDS)
    for name in writer.split_names(config.log.writers):
        writer.find_writer(name)


def make_masking(config: ConfigDict) -> masking.Masking:
    """Make the masking that data.masking and its refinements name."""
    data = config.data
    return masking.make_masking(
        data.masking,
        rate=data.mask_rate,
        unit=data.mask_unit,
        replacement=data.replacement,
        paper_compat=data.paper_compat,
    )


def check_plan(config: ConfigDict, needs: frozenset[str]) -> None:
    """Refuse an objective that needs what the plan cannot give."""
    if "nsp" in needs and config.data.plan != "pairs":
        raise UserError(
            f"objective={config.objective!r} needs sentence pairs: data.plan must be "
            f"pairs, not {config.data.plan!r}"
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


def from_json(text: str) -> ConfigDict:
    """Read a config back; keys of a later version than its own keep their defaults."""
    config = base()
    config.update(config_dict.ConfigDict(json.loads(text)))
    return config


def differences(old: ConfigDict, new: ConfigDict) -> list[str]:
    """List what differs and matters: "optim.lr: 0.0001 -> 0.5"."""
    a, b = flatten(old), flatten(new)
    return [
        f"{key}: {a.get(key)} -> {b.get(key)}"
        for key in sorted({*a, *b})
        if a.get(key) != b.get(key) and not FREE.fullmatch(key)
    ]


# ---------------------------------------------------------------- a run's directory
def check_workdir(path: Any, config: ConfigDict, allow_change: bool) -> None:
    """Refuse a workdir that cannot be one, or that holds a run of another config."""
    if path.exists() and not path.is_dir():
        raise UserError(f"--workdir={path} is a file")
    if not workdir.is_remote(path):
        there = next(p for p in (path, *path.parents) if p.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise UserError(f"--workdir={path} cannot be written")
    file = path / "config.json"
    if not file.exists():
        return
    try:
        changes = differences(from_json(file.read_text()), config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{file} cannot be read: {' '.join(str(e).split())}") from e
    if changes and not allow_change:
        raise UserError(
            f"--workdir={path} holds a run of another config: {'; '.join(changes)}; "
            "take another workdir, or --allow_config_change to go on with this one"
        )


def check_init_from(path: str) -> Any:
    """Return the checkpoint that init_from names; UserError unless it is whole."""
    try:
        found = manifest.resolve(path)[1]
    except OSError as e:
        raise UserError(f"init_from={path}: {e}") from e
    if wrong := manifest.problem(found):
        raise UserError(f"init_from={path}: checkpoints/{found.name}: {wrong}")
    return found


def open_model(path: str, flag: str) -> tuple[ConfigDict, Any, Any, dict[str, Any]]:
    """Open a workdir (its newest checkpoint) or one of its checkpoints.

    Returns (config, tokenizer, checkpoint, what the checkpoint says of itself).
    Raises UserError naming `flag` when there is no whole checkpoint.
    """
    from bertjax.data.tokenizers import load_tokenizer

    try:
        directory, checkpoint = manifest.resolve(path)
    except OSError as e:
        raise UserError(f"{flag}={path}: {e}") from e
    wrong = manifest.problem(checkpoint)
    if wrong:
        raise UserError(f"{flag}={path}: checkpoints/{checkpoint.name}: {wrong}")
    meta = manifest.read_meta(checkpoint)
    tokenizer = workdir.read_directory(directory / "tokenizer", load_tokenizer)
    if tokenizer.identity != meta["tokenizer"]:
        raise UserError(f"{directory}/tokenizer is not the one of {checkpoint}")
    return from_json(json.dumps(meta["config"])), tokenizer, checkpoint, meta


# ---------------------------------------------------------------- running commands
def command(main: Callable[[Sequence[str]], int | None]) -> None:
    """Run a command and leave with its status; a UserError is one line and status 2."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(sys.modules["__main__"].__doc__)
        return
    try:
        status = main(sys.argv[1:]) or 0
    except UserError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        status = 2
    except RunError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        status = 1
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # head, less and the like have read enough
        status = 0
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of tf.data and of a library import may still run: nothing is left to do.
    os._exit(status)
