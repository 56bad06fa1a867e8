# SPDX-License-Identifier: Apache-2.0
"""Prepare a task: read a config, load its tokenizer, encode its labeled rows."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError, counted, join_names, registry
from bertjax.data.corpus.sources import (
    expand_paths,
    named_sources,
    report_repeats,
)
from bertjax.data.token_store.prepare_data import Prepared
from bertjax.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from bertjax.models.families import in_effect
from bertjax.storage.paths import expand
from bertjax.tasks.catalog import TASKS
from bertjax.tasks.tables import Say, parse_lines, silent
from bertjax.tasks.task_rows import Asking, Form, Limits, Rows, Targets, check_label
from bertjax.tasks.task_type import (
    TaskType,
    find_task_type,
    get_task_type,
    load_task_type,
    shipped_task_type,
    task_type_names,
    with_options,
)

# as in fairseq's RoBERTa
TWO_SEPARATORS = ("roberta", "xlm-roberta", "camembert", "mpnet")


def is_task(config: ConfigDict) -> bool:
    """Return whether a config trains on labeled rows."""
    return bool(config.task.name or config.task.text)


def settle(config: ConfigDict, overrides: Any = ()) -> None:
    """Fill in empty config values: from the named task, then the type's usual columns.

    overrides: the keys set on the command line. Raises UserError.
    """
    if config.task.name:
        _settle_named(config, overrides)
    task_type = _task_type_of(config)
    for key, column in task_type.columns.items() if task_type else ():
        other = task_type.instead.get(key)
        if f"task.{key}" not in overrides and not (other and config.task[other]):
            config.task[key] = config.task[key] or column


def _task_type_of(config: ConfigDict) -> TaskType | None:
    """Return a config's type, or None; import outside heads only if there is a task."""
    find = find_task_type if is_task(config) else shipped_task_type
    return find(config.objective)


def _settle_named(config: ConfigDict, overrides: Any) -> None:
    task = registry.pick("task.name", config.task.name, TASKS)
    first, *second = task.columns
    usual = {"text": first, "text_pair": "".join(second), "label": task.label}
    usual |= {k: ",".join(getattr(task, k)) for k in ("labels", "metrics", "choices")}
    for key, value in usual.items():
        config.task[key] = config.task[key] or value
    files = [
        s for s in registry.split_list(config.data.train) if not s.startswith("tfds:")
    ]
    if files and task.valid and not config.data.valid and "data.valid" not in overrides:
        raise UserError(
            f"data.valid is empty: data.train={config.data.train} is not "
            f"{task.train}, so name its validation set too (data.valid= for none)"
        )
    for key in ("train", "valid"):
        if f"data.{key}" not in overrides:
            config.data[key] = config.data[key] or getattr(task, key)
    own, named = (shipped_task_type(x) for x in (config.objective, task.objective))
    # An objective for rows with the same columns may replace the task's.
    fits = own and named and own.columns and own.columns == named.columns
    if "objective" not in overrides and not fits:
        config.objective = task.objective


def check(config: ConfigDict) -> Tokenizer | None:
    """Raise UserError for faults that show without reading the tables.

    Returns the tokenizer, or None if it is made from the tables.
    """
    data = config.data
    check_task(config)
    is_made = get_task_type(config.objective).make_tokenizer is not None
    if not (data.vocab or is_made):
        raise UserError(
            "data.vocab is empty: give the vocabulary, or a pretrained model that has "
            "one, --config.init_from=DIR"
        )
    if data.packed or config.phases:
        key = "data.packed" if data.packed else "phases"
        raise UserError(
            f"{key} has no effect on a task, whose rows are not packed and of one "
            "length: leave it out"
        )
    for key in ("train", "valid"):
        locate(config, key)
    if is_made and not data.vocab:
        return None
    return load_tokenizer(str(expand(data.vocab, "data.vocab")), data.lower_case)


def check_task(config: ConfigDict) -> None:
    """Raise UserError for faults of config.task and its objective."""
    task = config.task
    task_type = get_task_type(config.objective)
    for key in ("text", task_type.label_key):
        if not task[key]:
            raise UserError(f"task.{key} is empty: name the column of the {key}")
    for key, only in task_type.unused.items():
        if task[key] not in ("", only):
            then = f"it is always {only!r}" if only else "leave it empty"
            raise UserError(
                f"task.{key}={task[key]} has no effect with objective="
                f"{config.objective}: {then}"
            )
    task_type.check(config)
    check_label(make_form(config).keys())
    for name in registry.split_list(task.metrics):
        registry.pick("task.metrics", name, dict.fromkeys(task_type.metrics))


def check_settings(config: ConfigDict, usual: ConfigDict) -> None:
    """Raise UserError for settings of config.task that only other task types read.

    usual: the config.task with the default values.
    """
    own = _task_type_of(config)
    if config.data.entities and not (own and own.make_graph):
        raise UserError(
            f"data.entities={config.data.entities} has no effect with objective="
            f"{config.objective}: it names the entities of triples"
        )
    owners: dict[str, list[str]] = {}
    for name in task_type_names():
        for key in load_task_type(name).settings:
            owners.setdefault(key, []).append(f"objective={name}")
    for key, names in owners.items():
        if not (own and key in own.settings) and config.task[key] != usual[key]:
            raise UserError(
                f"task.{key}={config.task[key]} has no effect with objective="
                f"{config.objective}: it is a setting of {' or '.join(names)}"
            )
    for key, other in own.needs.items() if own else ():
        if not config.task[other] and config.task[key] != usual[key]:
            raise UserError(
                f"task.{key}={config.task[key]} has no effect with objective="
                f"{config.objective} where task.{other} is empty: leave it out"
            )


def locate(config: ConfigDict, side: str) -> dict[str, list[str]]:
    """Return the files of each part of data.train or data.valid; side: the key's name.

    tfds: entries are returned unchanged. Raises UserError for files that do not exist.
    """
    key, task_type = f"data.{side}", get_task_type(config.objective)

    def paths(entry: str) -> list[str]:
        if entry.startswith("tfds:"):
            return [entry]
        file, pattern = task_type.locate(entry, key), task_type.file_names
        return expand_paths(file, key, pattern=pattern)

    parts = named_sources(config.data[side], key).items()
    return {
        name: [*chain(*map(paths, registry.split_list(part)))] for name, part in parts
    }


def fill_in_task(
    config: ConfigDict, objective: str, labels: Sequence[str], longest: int
) -> None:
    """Fill in config.task for a model that was finetuned outside bertjax.

    The columns are text and label unless config.json names others (hf_task_config.py).
    longest: the most tokens that the model accepts.
    """
    config.objective = objective
    task_type = load_task_type(objective)
    config.data.length = min(task_type.max_length or longest, longest)
    columns = {"text": "text", "label": "label", "choices": ""} | task_type.columns
    config.task.update(columns | task_type.imported(labels))


def rename(config: ConfigDict, columns: str) -> None:
    """Set other columns for the texts: TEXT or TEXT,TEXT_PAIR. Raises UserError.

    For multiple choice, TEXT[+QUESTION][,CHOICE...]; without CHOICE the columns of the
    choices do not change.
    """
    task_type = get_task_type(config.objective)
    most, names = task_type.text_columns, registry.split_list(columns)
    if not names:
        raise UserError(f"--columns={columns} names no column")
    names = task_type.name_columns(config, names)
    least = 1 + _needs_pair(config, task_type)
    if not least <= len(names) <= most:
        have = {0: "columns whose names are fixed", least: f"{most}"}
        raise UserError(
            f"--columns={columns} names {counted(len(names), 'text')}: rows of "
            f"objective={config.objective} have {have.get(most, f'{most} at most')}"
        )
    config.task.text, config.task.text_pair = (*names, "")[:2]


def _needs_pair(config: ConfigDict, task_type: TaskType) -> bool:
    """Return whether rows need a second text column."""
    other = task_type.instead.get("text_pair")
    return "text_pair" in task_type.columns and not (other and config.task[other])


def separators(config: ConfigDict) -> int:
    """Return the number of separators between two texts in the model's family."""
    return 2 if config.model.family in TWO_SEPARATORS else 1


def make_form(config: ConfigDict) -> Form:
    """Return the form of a config's rows; its labels may still be ()."""
    task, task_type = config.task, get_task_type(config.objective)
    usual = task_type.default_metrics or task_type.metrics
    columns = tuple(filter(None, (task.text, task.text_pair)))
    if task.choices:
        columns = task.text, task.text_pair, *registry.split_list(task.choices)
    labels = registry.split_list(task.labels)
    if twice := [name for name in labels if labels.count(name) > 1]:
        raise UserError(f"task.labels={task.labels}: {twice[0]!r} occurs twice")
    label = task_type.label_key
    return Form(
        columns=columns,
        label=task[label],
        labels=tuple(labels),
        separators=separators(config),
        metrics=tuple(registry.split_list(task.metrics)) or usual,
        limits=Limits(*(task[key] for key in Limits._fields)),
        asking=Asking(label=f"task.{label}"),
        targets=targets_of(config) if task_type.generates else None,
        drawn=task.negatives,
        candidates=task.candidates,
        settings=task_type.form_settings(task),
        passages=task.passages,
        index=task.index,
    )


def saved_form(config: ConfigDict, meta: Mapping[str, Any]) -> Form:
    """Return the form of a finetuned model's rows; meta: of its checkpoint."""
    form, task = make_form(config), meta["task"]
    between = task.get("separators", form.separators)
    open_graph = get_task_type(config.objective).open_graph
    graph = open_graph(config, task) if open_graph else None
    labels = tuple(task["labels"])
    return form._replace(labels=labels, separators=between, graph=graph)


def parse_objects(
    config: ConfigDict, form: Form, rows: Sequence[str | Mapping[str, Any]], name: str
) -> Sequence[Any]:
    """Read rows to answer: {column: value}, or a string for the first column.

    If the task type has its own format of lines, as tagging has, strings are read as
    such lines. name: of the rows, for messages. Raises UserError for a row that lacks a
    column.
    """
    if not rows:
        return []
    columns = form.keys(labelled=False, flags=True)
    first = next(iter(columns.values()))
    task_type = get_task_type(config.objective)
    own_lines = task_type.parse_lines not in (None, parse_lines)
    if own_lines and all(isinstance(row, str) for row in rows):
        lines = "".join(f"{' '.join(row.split())}\n" for row in rows)
        return list(task_type.parse_lines(lines, name, columns, silent))
    objects = [{first: row} if isinstance(row, str) else dict(row) for row in rows]
    try:
        lines = "\n".join(map(json.dumps, objects))
    except TypeError as e:
        raise UserError(f"{name}: {e}") from e
    return task_type.parse(lines, name, columns, silent)


def targets_of(config: ConfigDict) -> Targets:
    """Return how a config's model generates texts."""
    model, length = in_effect(config.model.to_dict()), config.task.target_length
    if model.get("num_decoder_layers"):
        return Targets(length, "decoder", bare=config.model.family == "t5")
    return Targets(length, "causal" if model.get("is_decoder") else "prefix")


def prepare(config: ConfigDict, say: Say) -> Prepared:
    """Read and encode the tables of data.train and data.valid.

    Raises UserError for faults of the user's input.
    """
    tokenizer, form = check(config), make_form(config)
    task_type = get_task_type(config.objective)
    paths = [locate(config, side).values() for side in ("train", "valid")]
    for key, parts in zip(("data.train", "data.valid"), paths, strict=True):
        for part in parts:
            report_repeats(part, key, say)
    scored = {*chain(*paths[1])}
    if both := [path for path in dict.fromkeys(chain(*paths[0])) if path in scored]:
        say(
            f"data.train and data.valid both read {join_names(both)}: the model is "
            "scored on rows that it learns from"
        )
    examples = [
        {
            name: task_type.read(part, key, form.keys(), say)
            for name, part in named_sources(config.data[side], key).items()
        }
        for side, key in (("train", "data.train"), ("valid", "data.valid"))
    ]
    given = form.labels
    form = task_type.find_labels([*chain(*examples[0].values())], form)
    if form.labels != given:
        say(f"{counted(len(form.labels), 'label')}: {', '.join(form.labels)}")
        why = "no row of data.train has it (list all in task.labels)"
        form = form._replace(asking=form.asking._replace(labels=why))
    if task_type.make_graph:
        every = ([*chain(*parts.values())] for parts in examples)
        form = form._replace(graph=task_type.make_graph(config, *every, say))
    if task_type.make_tokenizer:
        tokenizer = check_vocabulary(task_type.make_tokenizer(form.graph), tokenizer)
    make = task_type.make_rows
    train, valid = (
        {name: make(part, form, tokenizer, True, say) for name, part in parts.items()}
        for parts in examples
    )
    # A batch may mix rows of all parts, so all get the same number of sequences.
    most = max(rows.choices for rows in train.values())
    for name, rows in train.items():
        if rows.choices < most:
            train[name] = replace(rows, choices=most)
    valid = {name: rows.for_scores() for name, rows in valid.items()}
    for name, rows in (*train.items(), *valid.items()):
        laid = rows.plan(config.data.length)
        for line in (laid.read_as(tokenizer), *laid.notes()):
            say(f"{name}: {line}")
    return Prepared(tokenizer, train, valid)


def check_vocabulary(tokenizer: Tokenizer, given: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer made from the examples. Raises UserError if `given` is
    another one."""
    if given and given.identity != tokenizer.identity:
        raise UserError(
            "data.vocab: the vocabulary is made of the entities and relations of "
            "data.train, and this one, or that of init_from, has others: leave it out"
        )
    return tokenizer


def objective_of(config: ConfigDict, parts: Mapping[str, Any]) -> str:
    """Return the objective with its task's options, such as "classify:classes=3"."""
    task = facts(config, parts).get("task")
    return with_head_options(config, task["labels"]) if task else config.objective


def with_head_options(config: ConfigDict, labels: Sequence[str]) -> str:
    """Return the objective with the options of its task's head."""
    options = get_task_type(config.objective).head_options(config.task, labels)
    return with_options(config.objective, **options)


def learn(meta: dict[str, Any], scores: Mapping[str, float | None]) -> None:
    """Store an evaluation's threshold, if any, in a checkpoint's task, for predict."""
    task, found = meta.get("task", {}), scores.get("threshold")
    if "threshold" in task and found is not None and math.isfinite(found):
        meta["task"] = {**task, "threshold": found}


def facts(config: ConfigDict, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a task that a checkpoint stores: {"task": {"labels": [...]}}.

    Tasks that make vectors also have "sentences": how to make them
    (sentence_transformers.py). Tasks with training questions that have no answer have
    "threshold", 0 until `learn`.
    """
    rows = [part.facts for part in parts.values() if isinstance(part, Rows)]
    if not rows:
        return {}
    task = {key: value for facts in rows for key, value in facts.items()}
    return {"task": task, **get_task_type(config.objective).facts(config)}
