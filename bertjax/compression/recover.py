# SPDX-License-Identifier: Apache-2.0
"""Recovery: short training of a compressed model by distillation from the dense one.

The compressed model is a student (docs/distillation.md), trained like any run. Pruned
weights stay 0 (optim.keep_zeros). Quantized matrices do not change (optim.freeze):
their codes and scales are not trained, but the biases, norms and heads are.
"""

import functools
import json
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.assembly.command_line import settle_config
from bertjax.assembly.models import LoadedModel, check_encoder, open_model, row_length
from bertjax.assembly.open_teacher import as_teacher
from bertjax.assembly.save_model import write_workdir
from bertjax.compression.calibration import SAME
from bertjax.compression.packed import Form
from bertjax.compression.write_model import Small
from bertjax.config import cli, schema
from bertjax.config.durations import duration
from bertjax.data.corpus.sources import parse_sources
from bertjax.objectives import parse
from bertjax.objectives.make_objective import make_objective

MAX_STEPS = 2**31 - 1  # steps
BATCH = 16  # rows per update, rounded up to a multiple of the devices
RATE = 3e-4
Train = Callable[[ConfigDict, str], int]  # bertjax.train.train


class Recovery(NamedTuple):
    """The length and the data of a recovery.

    minutes, steps: one of them is not None. text: files of running text. rows: files of
    labeled rows of the finetuned model's task, instead of text. length: tokens per row
    of text; None: 128, or the model's greatest length if that is less.
    """

    minutes: float | None
    steps: int | None
    text: str
    rows: str = ""
    length: int | None = None
    seed: int = 0


def read_recovery(
    minutes: float | None, steps: int | None, rows: str | None, **others: Any
) -> Recovery | None:
    """Return the Recovery that the flags request; None without one, or with 0 steps.

    Raises UserError if both minutes and steps are given, or rows and neither.
    """
    if minutes is not None and steps is not None:
        raise UserError(
            f"--recover_minutes={minutes:g} and --recover_steps={steps}: give one"
        )
    if minutes is None and steps is None and rows:
        raise UserError(
            f"--recover_data={rows}: say how long, by --recover_minutes or "
            "--recover_steps"
        )
    if not minutes and not steps:
        return None
    return Recovery(minutes, steps, rows=rows or "", **others)


def check_recovery(opened: LoadedModel, how: Recovery) -> None:
    """Raise UserError if a model cannot recover with this data."""
    check_encoder(opened, "--model")
    if how.rows:
        if "task" not in opened.meta:
            raise UserError(
                f"--recover_data={how.rows}: the model is not finetuned; its text is "
                "--text"
            )
        name, teacher = opened.config.objective, as_teacher(opened, opened.cfg)
        if not make_objective(name, opened.cfg, teacher=teacher)[0].init_teacher:
            raise UserError(
                f"--recover_data={how.rows}: rows of objective={name} teach no soft "
                "labels: leave it out, and the model recovers on --text"
            )
        return
    if not how.text:
        raise UserError("--text is missing: a model recovers on texts")
    parse_sources(how.text, "--text", "train")
    row_length(opened.cfg, how.length)


def recover(
    small: Small, how: Recovery, train: Train, teacher: str, weights: str = ""
) -> Small:
    """Train a compressed model with the dense one as its teacher.

    teacher: the path of the dense model; weights: which of its parameters were
    compressed. train: trains a config in a new workdir. Returns the model with its
    trained parameters, and with facts about the recovery; `small` is not changed.
    Raises UserError.
    """
    opened = small.opened
    with tempfile.TemporaryDirectory(prefix="bertjax-recovery-") as folder:
        cli.say(f"recovery: a run in {folder}, which is removed when it has ended")
        student, run = f"{folder}/student", f"{folder}/run"
        Path(student).mkdir()
        write_workdir(Path(student), lambda: small.params, opened)
        if weights:
            teacher = f"{folder}/teacher"
            Path(teacher).mkdir()
            read = functools.partial(opened.read_params, weights=weights)
            write_workdir(Path(teacher), read, opened)
        config = make_config(small, how, student, teacher)
        try:
            train(config, run)
        except UserError as e:
            where = f"--recover_data={how.rows}" if how.rows else f"--text={how.text}"
            text = str(e).replace(student, "SMALL").replace(f"teacher={teacher}", "it")
            raise UserError(f"recovery by {where}: {text}") from None
        learnt = open_model(run, "--model", lambda text: None).read_params()
        facts = read_facts(Path(run)) | {"objective": config.objective}
    params = merge(small.params, learnt)
    return small._replace(params=params, about=small.about | {"recovery": facts})


def make_config(small: Small, how: Recovery, student: str, teacher: str) -> ConfigDict:
    """Return the config of a recovery; student: a workdir of the compressed model.

    The objective of a masked LM is mlm+distil. Other models, and finetuned models
    without rows, are trained to match the teacher's hidden states. With rows, the
    objective is that of the task, with the labels and the teacher's soft labels.
    """
    import jax

    opened, config = small.opened, schema.base()
    config.model.update(opened.config.model.to_dict())
    # No dropout: the teacher has none, and the compressed model has little capacity.
    config.model.hidden_dropout_prob = config.model.attention_probs_dropout_prob = 0.0
    config.data.update({key: opened.config.data[key] for key in SAME})
    config.data.vocab = f"{student}/tokenizer"
    config.data.engine = "python"
    config.init_from, config.teacher, config.seed = student, teacher, how.seed
    if how.rows:
        config.task.update(opened.config.task.to_dict())
        config.task.name = ""  # its files are not those of the recovery
        # A batch is small here, and the teacher's vectors replace its stored scores.
        config.task.chunks, config.task.margin_weight = 1, 0.0
        config.data.train, config.data.length = how.rows, opened.config.data.length
        config.objective = opened.config.objective
    else:
        config.data.update(train=how.text, plan="full_sentences")
        config.data.length = row_length(opened.cfg, how.length)
        words = has_word_head(small)
        config.objective = "mlm+distil" if words else "distil:kl=0,cosine=1"
    config.batch_size = -(-BATCH // jax.device_count()) * jax.device_count()
    config.optim.update(lr=RATE, wd=0.0, **patterns(small.forms, config.objective))
    config.optim.warmup.percent = 10.0
    config.budget_minutes = how.minutes
    if how.steps is not None:
        config.total.steps = how.steps
    config.log.every.steps, config.log.writers = 1, "jsonl"
    config.eval.examples = 0  # do not evaluate, and save only the last state
    config.eval.every = config.checkpoint.every = duration(steps=MAX_STEPS)
    settle_config(config, {"data.train": how.rows, "data.valid": ""})
    return config


def has_word_head(small: Small) -> bool:
    """Return True for a masked LM with its head, which a finetuned model has lost."""
    config, meta = small.opened.config, small.opened.meta
    is_masked_lm = "mlm" in {part.name for part in parse(config.objective)}
    has_head = "mlm" in small.params or not small.opened.cfg.has_head_parameters
    return is_masked_lm and has_head and "task" not in meta


def patterns(forms: Mapping[str, Form], objective: str) -> dict[str, str]:
    """Return optim.freeze and optim.keep_zeros, which protect the compressed leaves."""
    has_head = "mlm" in {part.name for part in parse(objective)}
    own = {p: f for p, f in forms.items() if has_head or p.startswith("encoder/")}
    quantized = [p for p, form in own.items() if form.name == "quantized"]
    pruned = [p for p in own if p not in quantized]
    return {
        "freeze": ",".join(map(re.escape, quantized)),
        "keep_zeros": ",".join(map(re.escape, pruned)),
    }


def read_facts(run: Path) -> dict[str, Any]:
    """Return the facts of a recovery: steps, tokens and losses.

    For each loss these are the means over the first and the last tenth of the steps.
    """
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "train/loss" in row]
    some = max(1, len(rows) // 10)
    names = [key for key in rows[0] if re.fullmatch("train/.*loss", key)]
    losses = {
        name.removeprefix("train/"): [
            float(np.mean([row[name] for row in part]))
            for part in (rows[:some], rows[-some:])
        ]
        for name in names
    }
    last = rows[-1]
    return {"steps": last["step"], "tokens": last["tokens"], "losses": losses}


def merge(params: Mapping[str, Any], learnt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters, with the leaves in `learnt` replacing theirs."""
    return {
        key: merge(value, learnt.get(key, {}))
        if isinstance(value, Mapping)
        else np.asarray(learnt.get(key, value), np.float32)
        for key, value in params.items()
    }
