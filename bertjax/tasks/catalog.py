# SPDX-License-Identifier: Apache-2.0
"""The tasks that have a name, as data; what a config says refines them."""

from collections.abc import Mapping
from dataclasses import dataclass

GLUE = "tfds:glue/{}"


@dataclass(frozen=True)
class Task:
    """train, valid: as data.train and data.valid have them. columns: of the text, of
    the second text if there is one. labels: in the order of their classes; none for a
    score. objective, metrics: names (bertjax/objectives, tasks/metrics.py)."""

    train: str
    valid: str
    columns: tuple[str, ...]
    labels: tuple[str, ...] = ()
    label: str = "label"
    objective: str = "classify"
    metrics: tuple[str, ...] = ("accuracy",)


def glue(name: str, columns: tuple[str, ...], labels: tuple[str, ...] = (), **more):
    """Make a task of GLUE as TensorFlow Datasets has it."""
    source = GLUE.format(name)
    return Task(f"{source}:train", f"{source}:validation", columns, labels, **more)


BOTH = ("accuracy", "f1")
MNLI = ("entailment", "neutral", "contradiction")
ENTAILMENT = ("entailment", "not_entailment")
PARAPHRASE = ("not_equivalent", "equivalent")
DUPLICATE = ("not_duplicate", "duplicate")
MATCHED = "m={0}:validation_matched,mm={0}:validation_mismatched"

# Wang et al. 2019 (GLUE), table 1, with its metrics.
TASKS: Mapping[str, Task] = {
    "cola": glue(
        "cola",
        ("sentence",),
        ("unacceptable", "acceptable"),
        metrics=("matthews", "accuracy"),
    ),
    "sst2": glue("sst2", ("sentence",), ("negative", "positive")),
    "mrpc": glue("mrpc", ("sentence1", "sentence2"), PARAPHRASE, metrics=BOTH),
    "qqp": glue("qqp", ("question1", "question2"), DUPLICATE, metrics=BOTH),
    "stsb": glue(
        "stsb",
        ("sentence1", "sentence2"),
        objective="regress",
        metrics=("pearson", "spearman"),
    ),
    "mnli": Task(
        "tfds:glue/mnli:train",
        MATCHED.format("tfds:glue/mnli"),
        ("premise", "hypothesis"),
        MNLI,
    ),
    "qnli": glue("qnli", ("question", "sentence"), ENTAILMENT),
    "rte": glue("rte", ("sentence1", "sentence2"), ENTAILMENT),
    "wnli": glue("wnli", ("sentence1", "sentence2"), ("not_entailment", "entailment")),
}
