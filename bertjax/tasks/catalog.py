# SPDX-License-Identifier: Apache-2.0
"""The named tasks, as data. The values of a config take precedence over theirs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """The defaults of a named task.

    train, valid: values for data.train and data.valid, "" if the user must give them.
    columns: the column of the text, and of the second text if there is one. labels: in
    the order of their classes; () for a score. objective, metrics: names
    (bertjax/objectives, tasks/metrics.py). choices: the columns of multiple choice.
    files: the benchmark's files as its own site distributes them.
    """

    train: str
    valid: str
    columns: tuple[str, ...]
    labels: tuple[str, ...] = ()
    label: str = "label"
    objective: str = "classify"
    metrics: tuple[str, ...] = ("accuracy",)
    choices: tuple[str, ...] = ()
    files: "Files | None" = None


@dataclass(frozen=True)
class Files:
    """The folder of a task in the benchmark's own layout, with train.tsv and the like.

    columns, label, labels: set if they differ from the task's; test_columns: set if
    they differ in a test file. valid, test: {name: file}; a test may list alternative
    files, separated by commas. submit: {name: file to submit}, if it is not FOLDER.tsv.
    """

    folder: str
    columns: tuple[str, ...] = ()
    label: str = ""
    labels: tuple[str, ...] = ()
    test_columns: tuple[str, ...] = ()
    valid: Mapping[str, str] = field(default_factory=lambda: {"valid": "dev.tsv"})
    test: Mapping[str, str] = field(default_factory=lambda: {"valid": "test.tsv"})
    submit: Mapping[str, str] = field(default_factory=dict)

    def file_to_submit(self, name: str) -> str:
        """Return the file name that the site requires for the answers to a test."""
        return self.submit.get(name, f"{self.folder}.tsv")


def of_tfds(name: str, *values: Any, **more: Any) -> Task:
    """Make a task whose rows are in TensorFlow Datasets."""
    return Task(f"tfds:{name}:train", f"tfds:{name}:validation", *values, **more)


BOTH = ("accuracy", "f1")
MNLI = ("entailment", "neutral", "contradiction")
ENTAILMENT = ("entailment", "not_entailment")
PARAPHRASE = ("not_equivalent", "equivalent")
DUPLICATE = ("not_duplicate", "duplicate")
NUMBERS = ("0", "1")
PAIR = ("sentence1", "sentence2")
ENTITIES = ("PER", "ORG", "LOC", "MISC")
QUESTIONS = ("question", "context"), (), "answers", "span", ("exact", "f1")
PASSAGES = ("query", "positive"), (), "negatives", "retrieve"

# GLUE: Wang et al. 2019, table 1, with its metrics; files as on its site.
TASKS: Mapping[str, Task] = {
    "cola": of_tfds(
        "glue/cola",
        ("sentence",),
        ("unacceptable", "acceptable"),
        metrics=("matthews",),
        files=Files("CoLA", ("4",), "2", NUMBERS, test_columns=("sentence",)),
    ),
    "sst2": of_tfds(
        "glue/sst2",
        ("sentence",),
        ("negative", "positive"),
        files=Files("SST-2", labels=NUMBERS),
    ),
    "mrpc": of_tfds(
        "glue/mrpc",
        PAIR,
        PARAPHRASE,
        metrics=BOTH,
        files=Files("MRPC", ("#1 String", "#2 String"), "Quality", NUMBERS),
    ),
    "qqp": of_tfds(
        "glue/qqp",
        ("question1", "question2"),
        DUPLICATE,
        metrics=BOTH,
        files=Files("QQP", label="is_duplicate", labels=NUMBERS),
    ),
    "stsb": of_tfds(
        "glue/stsb",
        PAIR,
        objective="regress",
        metrics=("pearson", "spearman"),
        files=Files("STS-B", label="score"),
    ),
    "mnli": Task(
        "tfds:glue/mnli:train",
        "m=tfds:glue/mnli:validation_matched,mm=tfds:glue/mnli:validation_mismatched",
        ("premise", "hypothesis"),
        MNLI,
        files=Files(
            "MNLI",
            PAIR,
            "gold_label",
            valid={"m": "dev_matched.tsv", "mm": "dev_mismatched.tsv"},
            test={
                "m": "test_matched.tsv",
                "mm": "test_mismatched.tsv",
                "ax": "../diagnostic/diagnostic.tsv,../AX/AX.tsv",
            },
            submit={"m": "MNLI-m.tsv", "mm": "MNLI-mm.tsv", "ax": "AX.tsv"},
        ),
    ),
    "qnli": of_tfds(
        "glue/qnli", ("question", "sentence"), ENTAILMENT, files=Files("QNLI")
    ),
    "rte": of_tfds("glue/rte", PAIR, ENTAILMENT, files=Files("RTE")),
    "wnli": of_tfds(
        "glue/wnli",
        PAIR,
        ("not_entailment", "entailment"),
        files=Files("WNLI", labels=NUMBERS),
    ),
    # Zellers et al. 2018, with the columns of its CSV files; Devlin et al. 2019,
    # section 4.4.
    "swag": Task(
        "",
        "",
        ("sent1", "sent2"),
        objective="choose",
        choices=("ending0", "ending1", "ending2", "ending3"),
    ),
    "hellaswag": of_tfds(
        "hellaswag", ("context",), objective="choose", choices=("endings",)
    ),
    # Lai et al. 2017. A row is an article with all its questions.
    "race": Task(
        "tfds:race/high:train,tfds:race/middle:train",
        "high=tfds:race/high:dev,middle=tfds:race/middle:dev",
        ("article", "questions"),
        label="answers",
        objective="choose",
        choices=("options",),
    ),
    # Rajpurkar et al. 2016, and 2018, where some questions have no answer.
    "squad": of_tfds("squad/v1.1", *QUESTIONS),
    "squad2": of_tfds("squad/v2.0", *QUESTIONS),
    # The question is one word: cause or effect.
    "copa": of_tfds(
        "super_glue/copa",
        ("premise", "question"),
        objective="choose",
        choices=("choice1", "choice2"),
    ),
    # Tjong Kim Sang and De Meulder 2003; labels in TensorFlow Datasets' order.
    "conll2003": Task(
        "tfds:conll2003:train",
        "tfds:conll2003:dev",
        ("tokens",),
        ("O", *(f"{mark}-{kind}" for kind in ENTITIES for mark in "BI")),
        "ner",
        "tag",
        ("f1", "precision", "recall", "accuracy"),
    ),
    # Any data set in BEIR's layout, with BEIR's two metrics (Thakur et al. 2021). MS
    # MARCO has its own metric (Nguyen et al. 2016).
    "beir": Task("", "", *PASSAGES, ("ndcg@10", "recall@100")),
    "msmarco": Task("", "", *PASSAGES, ("mrr@10", "recall@100")),
}
