# SPDX-License-Identifier: Apache-2.0
"""From config values to a tokenizer and the labelled rows of each source."""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections.config_dict import ConfigDict

from bertjax import UserError, objectives, registry
from bertjax.data.corpus.line_repair import join_names
from bertjax.data.corpus.sources import (
    expand_paths,
    named_sources,
    report_repeats,
    split_sources,
)
from bertjax.data.token_store.prepare_data import Prepared
from bertjax.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from bertjax.tasks import (
    choice_rows,
    metrics,
    passages,
    question_rows,
    retrieval_rows,
    search,
    tables,
    tag_files,
    tag_rows,
    text_rows,
)
from bertjax.tasks.catalog import TASKS
from bertjax.tasks.task_rows import Form, Limits, Rows, check_label


class Kind(NamedTuple):
    """What an objective's examples are made of, and how they are scored.

    read(value, key, columns, say) -> examples of files; parse(text, name, columns, say)
    -> those of standard input. find(examples, form) -> the form, with its labels.
    make(examples, form, tokenizer, labelled, say) -> rows. metrics: their names;
    default: those that count where nothing else is said. unused: keys of config.task
    that say nothing, and the only value that they may have beside "". columns: keys of
    config.task that need not be given, and what they then are. wanted: what is
    written in the place of a directory. locate(entry, key) -> the file that an entry of
    a source names. bare: as parse, of plain text, a text a line; None: it has no rows.
    """

    read: Callable[..., Sequence[Any]]
    parse: Callable[..., Sequence[Any]]
    find: Callable[[Sequence[Any], Form], Form]
    make: Callable[..., Rows]
    metrics: Sequence[str]
    default: tuple[str, ...]
    unused: Mapping[str, str]
    columns: Mapping[str, str] = {}
    wanted: str = tables.WANTED
    locate: Callable[[str, str], str] = lambda entry, key: entry
    bare: Callable[..., Iterable[Any]] | None = None


TABLE = tables.read_rows, tables.parse_text
TAGS = {"text": "1", "label": "-1"}  # the first column and the last
SQUAD = {"text": "question", "text_pair": "context", "label": "answers"}
KINDS = {
    "classify": Kind(
        *TABLE,
        text_rows.find_labels,
        text_rows.make_texts,
        [*metrics.OF_CLASSES],
        ("accuracy",),
        {"choices": ""},
        bare=tables.parse_lines,
    ),
    "regress": Kind(
        *TABLE,
        lambda rows, form: form,
        text_rows.make_texts,
        [*metrics.OF_NUMBERS],
        ("pearson", "spearman"),
        {"labels": "", "choices": ""},
        bare=tables.parse_lines,
    ),
    "tag": Kind(
        tag_files.read_sentences,
        tag_files.parse_text,
        tag_rows.find_tags,
        tag_rows.make_tags,
        tag_rows.METRICS,
        tag_rows.METRICS,
        {"text_pair": "", "choices": ""},
        TAGS,
        tag_files.WANTED,
        bare=tag_files.parse_sentences,
    ),
    "span": Kind(
        question_rows.read_questions,
        question_rows.parse_text,
        lambda questions, form: form,
        question_rows.make_asked,
        question_rows.METRICS,
        ("exact", "f1"),
        {**SQUAD, "labels": "", "choices": ""},
        SQUAD,
        question_rows.WANTED,
    ),
    "retrieve": Kind(
        passages.read_collections,
        tables.parse_text,
        lambda read, form: form,
        retrieval_rows.make_pairs,
        [*search.MEASURES],
        (*search.MEASURES,),
        {"labels": "", "choices": ""},
        {k.removeprefix("task."): v for k, v in passages.COLUMNS.items()},
        locate=passages.locate,
    ),
    "choose": Kind(
        *TABLE,
        lambda rows, form: form,
        choice_rows.make_choices,
        ("accuracy",),
        ("accuracy",),
        {},
    ),
}
POOLINGS = dict.fromkeys(("mean", "cls"))  # models/pooling.py, which needs jax
CLASSES = ("classify", "tag")  # whose heads have a class for each label
# What a head's `outputs` returns, by which rows are scored and answered.
OUTPUTS = {
    **dict.fromkeys(("classify", "regress", "choose"), ("scores",)),
    "tag": ("tags", "probability"),
    "span": ("start_logits", "end_logits"),
    "retrieve": ("vectors",),
}
TWO_SEPARATORS = ("roberta", "xlm-roberta", "camembert")  # Liu et al. 2019's fairseq


def task_type(objective: str) -> str | None:
    """Return the name of the KINDS that an objective learns from; None: no labels.

    One from outside the package says it itself, and is imported. Raises UserError.
    """
    if objective in KINDS:
        return objective
    (name, _), *more = objectives.parse(objective)
    if more or "." not in name:
        return None
    return objectives.task_type(objective)


def kind_of(objective: str) -> Kind:
    """Return the kind of rows that an objective learns from. Raises UserError."""
    found = task_type(objective)
    if found is not None and found != objective:
        return registry.pick(f"objective={objective}: task_type", found, KINDS)
    (name, _), *more = objectives.parse(objective)
    if found is None and "." in name and not more:
        raise UserError(
            f"objective={objective} does not say which labelled rows it learns from: "
            f"give its Head a task_type; known: {', '.join(sorted(KINDS))}"
        )
    return registry.pick("objective", objective, KINDS)


def check_outputs(task_type: str, found: Iterable[str]) -> None:
    """Refuse a head that does not return what rows are answered by: UserError."""
    if lacking := [name for name in OUTPUTS[task_type] if name not in found]:
        raise UserError(
            f"objective: `outputs` of a head for rows of {task_type} lacks "
            f"{', '.join(lacking)}; it returns {', '.join(found) or 'nothing'}"
        )


def is_task(config: ConfigDict) -> bool:
    """True for a config that learns from labelled rows."""
    return bool(config.task.name or config.task.text)


def settle(config: ConfigDict, overrides: Any = ()) -> None:
    """Fill in what a named task says and the config does not, and usual columns.

    overrides: the keys that the command line gave. Raises UserError.
    """
    if config.task.name:
        _settle_named(config, overrides)
    if config.objective in KINDS or (is_task(config) and task_type(config.objective)):
        for key, column in kind_of(config.objective).columns.items():
            if f"task.{key}" not in overrides:
                config.task[key] = config.task[key] or column


def _settle_named(config: ConfigDict, overrides: Any) -> None:
    task = registry.pick("task.name", config.task.name, TASKS)
    first, *second = task.columns
    told = dict(text=first, text_pair="".join(second), label=task.label)
    told |= dict(labels=",".join(task.labels), metrics=",".join(task.metrics))
    told |= dict(choices=",".join(task.choices))
    for key, value in told.items():
        config.task[key] = config.task[key] or value
    files = [s for s in split_sources(config.data.train) if not s.startswith("tfds:")]
    if files and task.valid and not config.data.valid and "data.valid" not in overrides:
        raise UserError(
            f"data.valid is empty: data.train={config.data.train} is not "
            f"{task.train}, so name its validation set too (data.valid= for none)"
        )
    for key in ("train", "valid"):
        if f"data.{key}" not in overrides:
            config.data[key] = config.data[key] or getattr(task, key)
    if "objective" not in overrides:
        config.objective = task.objective


def check(config: ConfigDict) -> Tokenizer:
    """Refuse what can be seen without reading the tables; returns the tokenizer."""
    data = config.data
    check_task(config)
    if not data.vocab:
        raise UserError(
            "data.vocab is empty: give the vocabulary, or a pretrained model that has "
            "one, --config.init_from=DIR"
        )
    if data.packed or config.phases:
        key = "data.packed" if data.packed else "phases"
        raise UserError(f"{key}: labelled rows are one to a row, of one length")
    for key in ("train", "valid"):
        locate(config, key)
    if task_type(config.objective) == "retrieve":
        check_retrieval(config)
    return load_tokenizer(str(Path(data.vocab).expanduser()), data.lower_case)


def check_task(config: ConfigDict) -> None:
    """Refuse what config.task alone tells, or does not. Raises UserError."""
    task = config.task
    kind = kind_of(config.objective)
    if not task.text:
        raise UserError("task.text is empty: the column of the text")
    if not task.label:
        raise UserError("task.label is empty: the column of the label")
    for key, only in kind.unused.items():
        if task[key] not in ("", only):
            told = f"says nothing to objective={config.objective}"
            told += f", where it is {only!r}" if only else ""
            raise UserError(f"task.{key}={task[key]} {told}")
    if task_type(config.objective) == "choose" and not split_sources(task.choices):
        raise UserError(
            "task.choices is empty: the columns of the choices, or of their list"
        )
    check_label(make_form(config).keys())
    for name in split_sources(task.metrics):
        registry.pick("task.metrics", name, dict.fromkeys(kind.metrics))


def locate(config: ConfigDict, side: str) -> dict[str, list[str]]:
    """Return what each part of "train" or "valid" reads: files, each looked at, and
    tfds: as it is.

    Raises UserError.
    """
    key, kind = f"data.{side}", kind_of(config.objective)
    found: dict[str, list[str]] = {}
    for name, part in named_sources(config.data[side], key).items():
        found[name] = []
        for entry in split_sources(part):
            paths = [entry]
            if not entry.startswith("tfds:"):
                paths = expand_paths(kind.locate(entry, key), key, pattern=kind.wanted)
            found[name] += paths
    return found


def check_retrieval(config: ConfigDict) -> None:
    """Refuse what a search over all passages of a batch, or of a text, cannot be."""
    if not config.task.text_pair:
        raise UserError("task.text_pair is empty: the column of the passage")
    registry.pick("task.pooling", config.task.pooling, POOLINGS)
    if config.eval.examples:
        raise UserError(
            f"eval.examples={config.eval.examples}: all passages are searched: "
            "eval.examples=0"
        )
    if len(named_sources(config.data.train, "data.train")) > 1:
        raise UserError("data.train: queries of one source alone are known, no mixture")


def tell(
    config: ConfigDict, objective: str, labels: Sequence[str], longest: int
) -> None:
    """Fill in the task of a model that was finetuned elsewhere.

    Columns are text and label unless config.json says otherwise (exported.py). longest:
    how many tokens the model takes; of questions google-research/bert's 384.
    """
    config.objective = objective
    config.data.length = min(384, longest) if objective == "span" else longest
    config.task.choices = "choices" if objective == "choose" else ""
    config.task.update({"text": "text", "label": "label"} | KINDS[objective].columns)
    if objective == "tag" and not all(map(tag_rows.is_bio, labels)):
        config.task.metrics = "accuracy"


def rename(config: ConfigDict, columns: str) -> None:
    """Take other columns for the texts: TEXT or TEXT,TEXT_PAIR. Raises UserError.

    Of choices TEXT[+QUESTION][,CHOICE...]: without a CHOICE the columns of choices, or
    of their list, stay as they are.
    """
    names = split_sources(columns)
    if not names:
        raise UserError(f"--columns={columns} names no column")
    if task_type(config.objective) == "choose":
        text, *ends = names
        config.task.choices = ",".join(ends) or config.task.choices
        names = [part.strip() for part in text.split("+")]
    most = {"span": 0, "tag": 1}.get(task_type(config.objective), 2)
    if not 1 <= len(names) <= most:
        has = (
            "no columns that have other names" if not most else f"{most} texts at most"
        )
        raise UserError(f"--columns={columns}: {config.objective} has {has}")
    config.task.text, config.task.text_pair = (*names, "")[:2]


def separators(config: ConfigDict) -> int:
    """Return how many separators a family puts between two texts."""
    return 2 if config.model.family in TWO_SEPARATORS else 1


def make_form(config: ConfigDict) -> Form:
    """Read what the rows look like out of a config; labels may still be ()."""
    task = config.task
    columns = tuple(filter(None, (task.text, task.text_pair)))
    if task.choices:
        columns = task.text, task.text_pair, *split_sources(task.choices)
    labels = split_sources(task.labels)
    if twice := [name for name in labels if labels.count(name) > 1]:
        raise UserError(f"task.labels={task.labels}: {twice[0]!r} is there twice")
    return Form(
        columns=columns,
        label=task.label,
        labels=tuple(labels),
        separators=separators(config),
        metrics=tuple(split_sources(task.metrics)) or kind_of(config.objective).default,
        limits=Limits(*(task[key] for key in Limits._fields)),
    )


def prepare(config: ConfigDict, say: Callable[[str], None]) -> Prepared:
    """Read and encode the tables of data.train and data.valid.

    Raises UserError: the user's input is at fault.
    """
    tokenizer, form = check(config), make_form(config)
    kind = kind_of(config.objective)
    train, valid = (locate(config, side) for side in ("train", "valid"))
    for key, parts in {"data.train": train, "data.valid": valid}.items():
        for paths in parts.values():
            report_repeats(paths, key, say)
    scored = {*chain.from_iterable(valid.values())}
    learnt = dict.fromkeys(chain.from_iterable(train.values()))
    if both := [at for at in learnt if at in scored]:
        told = f"data.train and data.valid both read {join_names(both)}"
        say(f"{told}: scores are of what is learnt")
    found = {
        key: {
            name: kind.read(part, f"data.{key}", form.keys(), say)
            for name, part in named_sources(config.data[key], f"data.{key}").items()
        }
        for key in ("train", "valid")
    }
    asked = form.labels
    form = kind.find([row for part in found["train"].values() for row in part], form)
    if form.labels != asked:
        say(f"{len(form.labels)} labels: {', '.join(form.labels)}")
    made = {
        key: {
            name: kind.make(rows, form, tokenizer, True, say)
            for name, rows in parts.items()
        }
        for key, parts in found.items()
    }
    made["valid"] = {name: rows.for_scores() for name, rows in made["valid"].items()}
    # Batches may take rows of any component: there is room for as many sequences.
    most = max(rows.choices for rows in made["train"].values())
    for name, rows in made["train"].items():
        if rows.choices < most:
            made["train"][name] = replace(rows, choices=most)
    for name, rows in (*made["train"].items(), *made["valid"].items()):
        laid = rows.plan(config.data.length)
        for line in (laid.read_as(tokenizer), *laid.notes()):
            say(f"{name}: {line}")
    return Prepared(tokenizer, made["train"], made["valid"])


def objective_of(config: ConfigDict, parts: Mapping[str, Any]) -> str:
    """Return the objective with what task.* and labels say: "classify:classes=3"."""
    task = config.task
    if task_type(config.objective) == "retrieve":
        options = {"cls": int(task.pooling == "cls"), "normalize": int(task.normalize)}
        return with_options(config.objective, temperature=task.temperature, **options)
    return with_labels(
        config.objective, facts(config, parts).get("task", {}).get("labels")
    )


def learn(meta: dict[str, Any], scores: Mapping[str, float | None]) -> None:
    """Put the threshold of an evaluation, if there is one, into what a checkpoint keeps
    of the task: predict answers by it."""
    task, found = meta.get("task", {}), scores.get("threshold")
    if "threshold" in task and found is not None and math.isfinite(found):
        meta["task"] = {**task, "threshold": found}


def with_labels(objective: str, labels: Sequence[str] | None) -> str:
    """Give an objective as many classes as there are labels, if it has some."""
    counts = labels and task_type(objective) in CLASSES
    return with_options(objective, classes=len(labels)) if counts else objective


def with_options(objective: str, **options: float) -> str:
    """Give an objective options, after its own.

    >>> with_options("lab.focal:gamma=3", classes=2)
    'lab.focal:gamma=3,classes=2'
    """
    told = ",".join(f"{key}={value}" for key, value in options.items())
    return f"{objective}{',' if ':' in objective else ':'}{told}"


def facts(config: ConfigDict, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint keeps of a task: {"task": {"labels": [...]}}.

    Of what makes vectors also "sentences", how (sentence_transformers.py). A task whose
    training questions do not all have answers has "threshold", 0 until `learn`.
    """
    rows = [part.facts for part in parts.values() if isinstance(part, Rows)]
    if not rows:
        return {}
    told = {"task": functools.reduce(operator.or_, rows)}
    if task_type(config.objective) == "retrieve":
        task = config.task
        how = {"pooling": task.pooling, "normalize": task.normalize}
        how |= {"dot": not task.normalize, "longest": config.data.length}
        told["sentences"] = how
    return told
