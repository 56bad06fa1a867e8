# SPDX-License-Identifier: Apache-2.0
"""Open config.teacher, the model that another one is distilled from.

Its parameters are read and kept on the devices, and no checkpoint stores them. A run
records a hash of their content, and resumes only with the same teacher.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.assembly import resolve
from bertjax.assembly.models import (
    LoadedModel,
    check_encoder,
    check_masked_lm,
    lower_case_differs,
    open_model,
    same_ids,
    same_pieces,
)
from bertjax.models.config import RUNTIME, EncoderConfig
from bertjax.objectives import BEFORE, CAUSAL, parse
from bertjax.objectives.base import Objective
from bertjax.objectives.make_objective import make_objective
from bertjax.objectives.teacher import Teacher
from bertjax.parallel.sharding import leaves_of
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.tables import Say, silent
from bertjax.tasks.task_type import find_task_type, get_task_type

KEY = "teacher"  # in a config, in run.json and in the metadata of checkpoints
# Parts of objectives that predict a token from the position before it.
NEXT = BEFORE | CAUSAL | {"dialogue"}
OF_TEACHERS = ("teacher_weight", "teacher_temperature")  # options of tasks' objectives


class ReadTeacher(NamedTuple):
    """A teacher's parameters, numpy arrays by path, and the sha256 of all of them."""

    leaves: Mapping[str, np.ndarray]
    sha256: str


def open_teacher(config: ConfigDict, say: Say) -> LoadedModel | None:
    """Open config.teacher without reading its parameters; return None if it is empty.

    Raises UserError if there is no model, or none of the config's kind.
    """
    if not config.teacher:
        return None
    model = open_model(config.teacher, KEY, say)
    where = f"{KEY}={config.teacher}"
    if not tasks.is_task(config):
        if any(part.name == "mlm" for part in parse(config.objective)):
            check_masked_lm(model, where, "give a pretrained teacher")
        check_encoder(model, where)
        check_places(config, model)
        return model
    theirs = model.config.objective if "task" in model.meta else ""
    if not theirs or get_task_type(theirs) is not get_task_type(config.objective):
        what = f"was finetuned for objective={theirs}" if theirs else "is not finetuned"
        raise UserError(
            f"{where} {what}: give a teacher of objective={config.objective}, the task "
            "that is learnt"
        )
    return model


def check_places(config: ConfigDict, model: LoadedModel) -> None:
    """Refuse a teacher that predicts a token at another position than its student.

    Models of masked next-token prediction predict a token at the position before it. If
    the student predicts nothing and only hidden states are compared, any teacher fits.
    Raises UserError.
    """
    theirs = resolve.reads_before(model.config)
    for objective in resolve.trained_objectives(config):
        parts = {part.name: part.options for part in parse(objective)}
        own = bool(parts.keys() & NEXT)
        if "distil" not in parts or own == theirs:
            continue
        if not (own or "mlm" in parts or parts["distil"].get("kl", 1)):
            continue
        places = "where it stands", "from the place before it"
        raise UserError(
            f"{KEY}={config.teacher} (objective={model.config.objective}) predicts a "
            f"masked token {places[theirs]}, and objective={objective} "
            f"{places[own]}: take {'mntp' if theirs else 'mlm'}+distil, or another "
            "teacher"
        )


def as_teacher(model: LoadedModel | None, cfg: EncoderConfig) -> Teacher | None:
    """Return what an objective needs of a teacher, which computes like `cfg`."""
    if model is None:
        return None
    own = {key: getattr(cfg, key) for key in (*RUNTIME, "dtype")}
    return Teacher(dataclasses.replace(model.cfg, **own))


def make_measured_objective(
    config: ConfigDict, cfg: EncoderConfig, name: str = ""
) -> tuple[Objective, EncoderConfig]:
    """Build a phase's objective for measurements; "" means the config's.

    The teacher is the config's own or, if one is needed and none is given, a stand-in:
    the student with twice as many layers.
    """
    tokens, name = resolve.token_ids(config), name or config.objective
    alone = make_objective(name, cfg, tokens)
    if config.teacher:
        teacher = as_teacher(open_teacher(config, silent), cfg)
    elif alone[0].needs_teacher:
        depth = 2 * cfg.num_hidden_layers
        teacher = Teacher(dataclasses.replace(cfg, num_hidden_layers=depth))
    else:
        return alone
    return make_objective(name, cfg, tokens, teacher)


def check_use(config: ConfigDict, objectives: Iterable[Any]) -> None:
    """Refuse an objective without its teacher, and a teacher that none uses.

    objectives: built with the teacher, if there is one. Raises UserError.
    """
    objectives = [*objectives]
    if not config.teacher and any(each.needs_teacher for each in objectives):
        raise UserError(
            f"objective={config.objective} learns from a teacher: give "
            "--config.teacher=DIR, a run's workdir or a Hugging Face directory"
        )
    options = (key for part in parse(config.objective) for key in part.options)
    if not config.teacher and (own := [k for k in options if k in OF_TEACHERS]):
        raise UserError(
            f"objective={config.objective}: without a teacher {own[0]} says nothing: "
            "give --config.teacher=DIR, or leave it out"
        )
    if config.teacher and not any(each.init_teacher for each in objectives):
        other = "" if tasks.is_task(config) else ", or take mlm+distil"
        raise UserError(
            f"{KEY}={config.teacher} has no effect with objective={config.objective}: "
            f"leave it out{other}"
        )


def check_fit(
    config: ConfigDict, model: LoadedModel | None, tokenizer: Any, labels: Any
) -> None:
    """Refuse a teacher that does not fit its student.

    It must use the same ids, read rows as long, know the same classes and make vectors
    in the same way. labels: those of the student's task. Raises UserError.
    """
    if model is None:
        return
    where = f"{KEY}={config.teacher}"
    if not same_ids(model.tokenizer, tokenizer):
        if same_pieces(model.tokenizer, tokenizer):
            raise UserError(lower_case_differs(where, model.tokenizer))
        raise UserError(
            f"{where} has another tokenizer than data.vocab={config.data.vocab}: a "
            "student reads its teacher's ids; leave data.vocab out"
        )
    phases = (phase.length for phase in resolve.wanted_phases(config))
    longest = max(config.data.length, *phases)
    if longest > model.cfg.max_length:
        key = "data.length" if longest == config.data.length else "phases: length"
        raise UserError(
            f"{where} reads {model.cfg.max_length} tokens, and {key} is {longest}"
        )
    task_type = find_task_type(config.objective)
    if task_type is None:  # its objective reads no head for labels
        return
    known = model.meta.get("task", {}).get("labels", [])
    if [*known] != [*labels]:
        raise UserError(
            f"{where} knows the labels {', '.join(known)}, the task has "
            f"{', '.join(labels)}: they have to be the same, in one order (task.labels)"
        )
    if not task_type.makes_vectors:
        return
    for key in ("pooling", "normalize"):
        own, known = config.task[key], model.config.task[key]
        if own != known:
            raise UserError(
                f"{where} makes vectors with task.{key}={known}, and here it is {own}: "
                f"a teacher's are made as its student's are; give task.{key}={known}"
            )


def read_teacher(config: ConfigDict, model: LoadedModel, wanted: Any) -> ReadTeacher:
    """Read the parameters of a model that a step reads; wanted: their shapes.

    Raises UserError if the model lacks some or they have other shapes, and for a
    masked-LM head that is not the encoder's (in ELECTRA it is the generator's).
    """
    params = model.read_params()
    if "generator" in params and "mlm" in wanted:
        raise UserError(
            f"{KEY}={config.teacher} is ELECTRA's pair, whose masked-LM head is the "
            "generator's: give the generator alone (convert --format=hf writes both)"
        )
    found = leaves_of(params)
    digest, leaves = hashlib.sha256(), {}
    for name, leaf in leaves_of(wanted).items():
        if name not in found or found[name].shape != leaf.shape:
            has = (
                f"has {name} {found[name].shape}" if name in found else f"lacks {name}"
            )
            raise UserError(
                f"{KEY}={config.teacher} {has}, and the objective reads {leaf.shape}"
            )
        leaves[name] = np.ascontiguousarray(found[name])
        digest.update(f"{name} {leaf.shape} {leaves[name].dtype}\n".encode())
        digest.update(memoryview(leaves[name]).cast("B"))
    return ReadTeacher(leaves, digest.hexdigest())


def check_same(path: Any, config: ConfigDict, meta: Any, sha256: str | None) -> None:
    """Refuse to resume with another teacher than a run began with.

    meta: the checkpoint's metadata; sha256: of the current teacher, None without one.
    Raises UserError.
    """
    known = meta.get(KEY)
    if known == sha256:
        return
    if sha256 is None:
        why = f"is empty, and {path} learns from one"
    elif known is None:
        why = f"is given, and {path} was trained without one"
    else:
        why = f"is another model than the one that {path} learns from"
    sums = " -> ".join((x or "none")[:16] for x in (known, sha256))
    raise UserError(
        f"{KEY}={config.teacher} {why} ({sums}): give that one, or take another workdir"
    )
