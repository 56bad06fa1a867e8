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
from bertjax.data import phases, pipeline
from bertjax.data.masks import masking
from bertjax.models.config import EncoderConfig
from bertjax.models.families import FAMILIES

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
    r"(log|checkpoint|profile|mesh|hosts)\..*|eval\.every\..*"
    r"|model\.(attention|remat|unroll|max_logits_mb)"
    r"|data\.(engine|cache|train|valid|vocab|similar|segmenter)"
)


# ---------------------------------------------------------------- writing configs
def duration(**given: float) -> ConfigDict:
    """Make a duration: one of steps, epochs, examples, tokens, percent (of the run)."""
    return ConfigDict(
        {u: t(given[u]) if u in given else placeholder(t) for u, t in UNITS.items()}
    )


def base() -> ConfigDict:
    """Return every key a config has, with defaults; configs/*.py change what differs.

    Model sizes are Hugging Face's names; those left empty follow `model.size` and
    `model.family` (bertjax/models/families.py).
    """
    return ConfigDict(
        dict(
            seed=0,
            objective="mlm",  # or mlm+sop, electra:generator=0.5, mlm+mine.module
            batch_size=256,  # sequences a step, over all devices and accumulation
            accumulate=1,  # micro-batches a step
            steps_per_call=1,  # updates the devices make at one call of the host
            dtype="auto",  # of the computation: float32 on CPU, else bfloat16
            init_from="",  # parameters: another run's workdir, or Hugging Face's
            deterministic=False,  # on GPU: bit-equal repetition, at a cost in speed
            total=duration(steps=100_000),
            budget_minutes=placeholder(float),  # of training: the schedule follows it
            # Length, batch size, mask rate over time (bertjax/data/phases.py), e.g.
            # "percent=90 length=128; length=512 batch_size=64 mask_rate=0.15"
            phases="",
            model=dict(
                family="bert",
                size="base",
                **{
                    f.name: placeholder(f.type)
                    for f in dataclasses.fields(EncoderConfig)
                    if f.name not in ("dtype", "pooler")
                },
            ),
            data=dict(
                # Files, globs, tfds:name:split, builtin:docs, with commas; components
                # of a mixture have names: wiki=a.txt,novels=b.txt or *=langs/*.txt
                train="",
                valid="",  # the same; names are those of the validation sets
                text_field="text",  # of JSON lines, Parquet, tfds
                group_field="",  # the field (language, domain) that parts a text
                entity_field="",  # the field with a list of names, for mask_unit=entity
                segmenter="",  # of words in Chinese: jieba, or jieba:DICTIONARY
                weights="",  # of the components in the batches: wiki=3,novels=1
                alpha=placeholder(float),  # or shares ~ size^alpha; 0.3: XLM-R
                # Of a trained tokenizer's sample; empty: as weights or alpha.
                vocab_alpha=placeholder(float),
                cache="~/.cache/bertjax",  # where token stores lie
                vocab="",  # empty: one is trained; ids:N for integers
                vocab_size=32_768,  # of a trained one
                tokenizer="unigram",  # of a trained one: or bpe, wordpiece, byte_bpe
                lower_case=placeholder(bool),  # empty: what the tokenizer's files say
                length=128,
                engine="tf",  # or python: the same batches without TensorFlow
                plan="pairs",  # or full_sentences, doc_sentences, document
                short_seq_prob=0.1,  # pairs: share of documents with short targets
                packed=False,  # several sequences a row, which do not see each other
                max_segments=placeholder(int),  # a row; empty: max(4, length / 16)
                # A preset: bert roberta albert electra distilbert spanbert macbert,
                # refined by the next keys.
                masking="bert",
                mask_rate=placeholder(float),
                mask_unit=placeholder(str),  # token, word, ngram, span, entity
                # Law of the units' lengths: 0.4,0.3,0.2,0.1 or geometric:0.2:10
                mask_lengths=placeholder(str),
                corruption=placeholder(str),  # of mask, random, keep: 0.8,0.1,0.1
                replacement=placeholder(str),  # uniform, unigram
                similar="",  # file of similar words, which macbert puts in
                max_predictions=placeholder(int),  # empty: the preset's
                paper_compat=False,  # the official code's quirks with special tokens
                max_line_bytes=64 * 2**20,
            ),
            # Finetuning: a task that has a name (bertjax/tasks/catalog.py), or the
            # columns of data.train's and data.valid's tables.
            task=dict(
                name="",
                text="",
                text_pair="",
                label="",
                labels="",  # of classes, in order; empty: found in the training rows
                metrics="",  # accuracy, f1, ... (bertjax/tasks/metrics.py)
            ),
            optim=dict(
                name="adamw",  # lamb, stableadamw, adafactor, muon
                lr=1e-4,
                wd=0.01,
                b1=0.9,
                b2=0.999,
                eps=1e-6,
                bias_correction=True,  # of adamw and lamb; False: Google's BERT
                clip=1.0,  # global norm; 0: none
                layer_decay=1.0,  # of the rate, a layer towards the embeddings
                warmup=duration(percent=1),
                schedule="linear",  # to 0; polynomial, cosine, wsd; or constant
                power=1.0,  # of polynomial
                decay=duration(percent=10),  # of wsd, before the end
                ema=0.0,  # decay of the parameters' moving average; 0: none
            ),
            mesh=dict(data=-1, fsdp=1, tensor=1),
            # With --multihost: seconds without a sign of life of a host, or without
            # a step, after which the others end (bertjax/parallel/watch.py).
            hosts=dict(timeout=120.0),
            log=dict(every=duration(steps=50), writers="jsonl,tensorboard"),
            # A trace of `steps` updates, after `start` of them; 0: none.
            profile=dict(start=10, steps=0),
            eval=dict(
                every=duration(percent=10),
                examples=2048,  # a fixed subset of each validation set; 0: all
                mask_rate=placeholder(float),  # empty: data.mask_rate's or the preset's
                ema=True,  # score, and use later, the moving average where there is one
            ),
            # Updates that could ruin a run (docs/training.md)
            guard=dict(
                nonfinite="skip",  # a loss or gradient that is not finite; stop: end
                factor=0.0,  # skip gradients so many times larger than of late; 0: none
                patience=10,  # skipped in a row, before going back to a checkpoint
                rewinds=3,  # then the run ends
            ),
            checkpoint=dict(
                every=duration(percent=5),
                keep_last=2,
                keep_every=placeholder(int),  # every m-th step is kept for ever
            ),
        )
    )


def read_arg(arg: str | None, size: str, family: str = "bert") -> tuple[str, bool]:
    """Read a config's ARG ("mini", "smoke", "mini,smoke"): (size, whether smoke)."""
    words = [w for w in (arg or "").split(",") if w]
    sizes = FAMILIES[family].sizes
    for word in words:
        if word != "smoke" and word not in sizes:
            raise registry.unknown("the config's ARG", word, [*sizes, "smoke"])
    smoke = "smoke" in words
    given = [w for w in words if w in sizes]
    return (given or ["tiny" if smoke else size])[-1], smoke


def split_arg(
    arg: str | None, names: Sequence[str]
) -> tuple[dict[str, str], str | None]:
    """Part a config's ARG into NAME=VALUE words and the rest: UserError otherwise.

    >>> split_arg("task=rte,smoke", ["task"])
    ({'task': 'rte'}, 'smoke')
    """
    words = [w.partition("=") for w in (arg or "").split(",") if w]
    named = {name: value for name, sign, value in words if sign}
    for name in named:
        registry.pick("the config's ARG", name, dict.fromkeys(names))
    return named, ",".join(word for word, sign, _ in words if not sign) or None


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
        from bertjax.disk import follow_init_from  # which needs this module
        from bertjax.tasks import prepare as tasks

        tasks.settle(values.config, overrides)
        follow_init_from(values.config)
        flags.DEFINE_string("overrides", json.dumps(overrides), "", flag_values=values)
        values.mark_as_parsed()
    return values


def config_arguments(argv: Sequence[str]) -> list[str]:
    """Return the arguments that name a config and change its keys.

    >>> config_arguments(["--seeds=3", "--config", "a.py", "--config.seed=1"])
    ['--config', 'a.py', '--config.seed=1']
    """
    out, rest = [], list(argv)
    while rest:
        word = rest.pop(0)
        if re.match(r"--?config(?![^=.])", word):
            out.append(word)
            if "=" not in word and rest:
                out.append(rest.pop(0))
    return out


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

    A larger model.vocab_size is padding, a smaller one is refused. `backend` (jax's
    default_backend()) decides what dtype="auto" is.
    """
    given = {k: v for k, v in config.model.items() if v is not None}
    family = registry.pick("model.family", given.pop("family"), FAMILIES)
    size = registry.pick("model.size", given.pop("size"), family.sizes)
    shape = {**family.fixed, **size, **given}
    shape.setdefault("intermediate_size", 4 * shape["hidden_size"])
    if shape.setdefault("vocab_size", vocab_size) < vocab_size:
        raise UserError(
            f"model.vocab_size={shape['vocab_size']} is smaller than the tokenizer's "
            f"{vocab_size} pieces: token ids would be >= vocab_size"
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


# ---------------------------------------------------------------- running commands
def say(text: str) -> None:
    """Speak on stderr: stdout belongs to results."""
    print(text, file=sys.stderr, flush=True)


def command(main: Callable[[Sequence[str]], int | None]) -> None:
    """Run a command and leave with its status; a UserError is one line and status 2."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(sys.modules["__main__"].__doc__)
        return
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
