# SPDX-License-Identifier: Apache-2.0
"""Read and write task heads in Hugging Face's directories: their kind and tensors.

What each class computes: transformers, models/*/modeling_*.py.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bertjax import UserError
from bertjax.interop.family import ANSWER, CHOICE, SEQUENCE, TOKEN, Family
from bertjax.models.config import EncoderConfig

# Our objective -> ending of the name of transformers' class.
CLASSES = {
    "classify": SEQUENCE,
    "regress": SEQUENCE,
    "tag": TOKEN,
    "span": ANSWER,
    "choose": CHOICE,
}
# ELECTRA's ForMultipleChoice pools like this by default.
SUMMARY = {
    "summary_type": "first",
    "summary_use_proj": True,
    "summary_activation": "gelu",
}
# Options that change the input of the classes.
OPTIONS = ("classifier_pooling", "pooler_activation", "task_transform")


class Task(NamedTuple):
    """An objective's head and the names of its classes: () for scores and spans."""

    head: str
    labels: tuple[str, ...]

    @property
    def classes(self) -> int:
        """The number of the head's outputs."""
        return 2 if CLASSES[self.head] == ANSWER else len(self.labels) or 1


def read_task(raw: Mapping[str, Any], where: str) -> Task | None:
    """Return the task of a config.json, or None if it has none that is known here.

    where: begins every message. Raises UserError for invalid labels.
    """
    names = raw.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name.endswith(CHOICE):
        known = all(raw.get(key, value) == value for key, value in SUMMARY.items())
        return Task("choose", ()) if known else None
    if not name.endswith((SEQUENCE, TOKEN, ANSWER)):
        return None
    labels = read_labels(raw, where)
    if name.endswith(TOKEN):
        return Task("tag", labels)
    if name.endswith(ANSWER):
        return Task("span", ()) if len(labels) == 2 else None
    problem = raw.get("problem_type")
    if len(labels) == 1 and problem in (None, "regression"):
        return Task("regress", ())
    several = len(labels) > 1 and problem in (None, "single_label_classification")
    return Task("classify", labels) if several else None


def read_labels(raw: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return the names of the classes; by default there are two."""
    names = raw.get("id2label")
    if names is None:
        count = raw.get("num_labels", 2)
        if type(count) is not int or not 1 <= count <= 1_000_000:
            raise UserError(f"{where}: num_labels={count!r} is not a number of classes")
        return _default_labels(count)
    try:
        return tuple(str(names[str(i)]) for i in range(len(names)))
    except (KeyError, TypeError):
        raise UserError(f"{where}: id2label names no classes 0, 1, ...") from None


def _default_labels(count: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{i}" for i in range(count))


def task_config(hf_class: str, labels: Sequence[str]) -> dict[str, Any]:
    """Return a task's keys of config.json. hf_class: a value of CLASSES."""
    if hf_class == CHOICE:
        return SUMMARY
    names = list(labels) or _default_labels(2 if hf_class == ANSWER else 1)
    config: dict[str, Any] = {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }
    if hf_class == SEQUENCE:
        kind = "single_label_classification" if labels else "regression"
        config["problem_type"] = kind
    return config


def with_head(
    family: Family, head: str, hf_class: str = "", where: str = "--format=hf: "
) -> Family:
    """Return the family with a task's head instead of its own heads.

    hf_class: ending of the name of the class there, for a head that CLASSES lacks.
    where: begins the message of the UserError for a class that the family lacks.
    """
    end = hf_class or CLASSES[head]
    if end not in family.task_heads:
        classes = ", ".join(family.class_prefix + name for name in family.task_heads)
        raise UserError(
            f"{where}{family.class_prefix}{end} is not supported; of "
            f"{family.model_type} these heads of tasks are: {classes or 'none'}"
        )
    names = family.task_heads[end]
    own = {path.replace("task/", f"{head}/"): name for path, name in names.items()}
    body = {p: n for p, n in family.names.items() if re.match("encoder/(?!pooler/)", p)}
    return dataclasses.replace(
        family,
        names={**body, **own},
        outside=frozenset(p for p in own if own[p] != family.names.get(p)),
        classes={head: end},
    )


def check_head(family: Family, cfg: EncoderConfig, theirs: EncoderConfig) -> None:
    """Refuse a head that the family computes differently. theirs: the family's."""
    for option in OPTIONS:
        has, needs = (getattr(c, option) for c in (cfg, theirs))
        if has != needs:
            raise UserError(
                f"--format=hf: model.{option}={has!r}: in transformers the head of "
                f"{family.model_type} is always {needs!r}"
            )
