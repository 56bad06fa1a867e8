# SPDX-License-Identifier: Apache-2.0
"""The interface TaskType, and how to find the type of an objective.

A task type is a module with a `TASK_TYPE`: one of bertjax/tasks/types, or any module by
its dotted name. Shipped types have the name of their objective; a head from outside the
package names its type itself (`Head.task_type`, objectives/base.py).
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError, objectives, registry
from bertjax.tasks import tables
from bertjax.tasks.task_rows import Form, Rows

PACKAGE = "bertjax.tasks.types"
POOLINGS = dict.fromkeys(("mean", "cls", "last"))  # models/pooling.py, which needs jax


@dataclass(frozen=True, kw_only=True)
class TaskType:
    """How the labeled rows of an objective are read, encoded, scored and answered.

    Reading and rows:
      read(value, key, columns, say) -> the examples of the files that a config value
        names; parse(text, name, columns, say) -> the examples of standard input;
        parse_lines: like parse, for plain text with one example per line; None if an
        example is more than one text.
      make_rows(examples, form, tokenizer, labelled, say) -> Rows.
      find_labels(examples, form) -> the form with the names of its classes.
      locate(entry, key) -> the file that an entry of a source names.
      file_names: what messages write for a file, such as "FILE.tsv".
      make_graph(config, train, others, say) -> Form.graph, which the rows of all sets
        share, from their examples; open_graph(config, facts) -> the graph of a model,
        from the task's facts in its checkpoint. make_tokenizer(graph) -> the tokenizer,
        if its vocabulary is the graph's.
    Scores:
      metrics: names that task.metrics may have; default_metrics: those used if it is
        empty, () for all. extra_scores(form) -> names of scores that only some rows
        have, which eval.best may name too. outputs: the names that a head's `outputs`
        must return, for scores and answers.
    Config:
      label_key: the key of config.task for the column of labels or targets.
      columns: default values of keys of config.task. instead: {key of `columns`: other
        key}; the default is not set if the other key is.
      unused: {key of config.task without effect: the only value it may have beside ""}.
        settings: keys of config.task that only this type and some others read; needs:
        {setting: key without which it has no effect}. check(config) raises UserError
        for other faults of config.task. imported(labels) -> keys of config.task for a
        model that was finetuned outside bertjax. max_length: of that model's rows.
      text_columns: the most columns of texts that --columns may name;
        name_columns(config, names) -> the columns of the texts, if --columns names
        other columns too.
      head_options(task, labels) -> options of the head's make_head, {"classes": 3};
        without labels (not read yet) it leaves out sizes that depend on them.
        several_sequences: the head's option `choices` is the sequences per row.
      form_settings(task) -> Form.settings, the parts of config.task that rows need
        beside columns, as a tuple; None: nothing. Raises UserError.
    Models:
      facts(config) -> facts that a checkpoint stores beside the labels.
      makes_vectors: the head makes vectors, for embed and for search, and no answers;
        has_threshold: answers may be withheld (predict --threshold); generates: labels
        and answers are texts, which the head over the vocabulary predicts
        (Form.targets); masks: the objective's features mask what is predicted, by the
        keys of config.data for masking.
      token_head: the head is the one over the vocabulary, whatever its parameters are.
      hf_class: the end of the name of transformers' class that computes the same from
        heads.init_task's parameters, for convert; "" for none.
      exported: the keys of config.task in config.json of an exported model, for a type
        that is exported as another one; None: all keys that have an effect.
    """

    read: Callable[..., Sequence[Any]] = tables.read_rows
    parse: Callable[..., Sequence[Any]] = tables.parse_text
    make_rows: Callable[..., Rows]
    metrics: tuple[str, ...]
    default_metrics: tuple[str, ...] = ()
    extra_scores: Callable[[Form], tuple[str, ...]] = lambda form: ()
    outputs: tuple[str, ...]
    find_labels: Callable[[Sequence[Any], Form], Form] = lambda examples, form: form
    parse_lines: Callable[..., Iterable[Any]] | None = None
    locate: Callable[[str, str], str] = lambda entry, key: entry
    file_names: str = tables.WANTED
    label_key: str = "label"
    columns: Mapping[str, str] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[ConfigDict], Any] = lambda config: None
    imported: Callable[[Sequence[str]], Mapping[str, str]] = lambda labels: {}
    max_length: int | None = None
    text_columns: int = 2
    name_columns: Callable[[ConfigDict, list[str]], list[str]] = lambda config, x: x
    head_options: Callable[..., dict[str, registry.Option]] = lambda task, labels: {}
    several_sequences: bool = False
    form_settings: Callable[[ConfigDict], tuple[Any, ...] | None] = lambda task: None
    facts: Callable[[ConfigDict], dict[str, Any]] = lambda config: {}
    makes_vectors: bool = False
    has_threshold: bool = False
    generates: bool = False
    masks: bool = False
    token_head: bool = False
    make_graph: Callable[..., Any] | None = None
    open_graph: Callable[..., Any] | None = None
    make_tokenizer: Callable[[Any], Any] | None = None
    hf_class: str = ""
    exported: tuple[str, ...] | None = None


def class_option(task: ConfigDict, labels: Sequence[str]) -> dict[str, float]:
    """Return the `head_options` of a head with one class per label."""
    return {"classes": len(labels)} if labels else {}


@functools.cache
def task_type_names() -> list[str]:
    """Return the names of the package's types, which are those of their objectives."""
    return registry.names(PACKAGE)


def load_task_type(name: str, key: str = "task_type") -> TaskType:
    """Return the type by its name or its module's dotted name. Raises UserError."""
    module = registry.load(key, name, PACKAGE)
    if not isinstance(getattr(module, "TASK_TYPE", None), TaskType):
        raise UserError(f"{key}={name!r}: the module has no TASK_TYPE, a TaskType")
    return module.TASK_TYPE


def shipped_task_type(objective: str) -> TaskType | None:
    """Return the type of a shipped objective; None for others, which are not loaded."""
    name = objective.partition(":")[0]  # without its options
    return load_task_type(name) if name in task_type_names() else None


def find_task_type(objective: str) -> TaskType | None:
    """Return the task type of an objective; None if it learns from running text.

    A head from outside the package is imported for its task_type. Raises UserError.
    """
    if found := shipped_task_type(objective):
        return found
    if not _is_outside(objective):
        return None
    from bertjax.objectives.make_objective import task_type_of  # which needs jax

    found = task_type_of(objective)
    return found and load_task_type(found, f"objective={objective}: task_type")


def _is_outside(objective: str) -> bool:
    (name, *_), *more = objectives.parse(objective)
    return "." in name and not more


def get_task_type(objective: str) -> TaskType:
    """Return the task type of an objective. Raises UserError if it has none."""
    if found := find_task_type(objective):
        return found
    if _is_outside(objective):
        raise UserError(
            f"objective={objective} does not say which labelled rows it learns from: "
            f"give its Head a task_type: {', '.join(task_type_names())}, or the dotted "
            "name of a module with a TASK_TYPE"
        )
    raise UserError(
        f"objective={objective} learns from running text, not from the rows of a table "
        f"(task.*), as these do: {', '.join(task_type_names())}"
    )


def check_outputs(task_type: str, found: Iterable[str]) -> None:
    """Raise UserError if a head's `outputs` lacks names that scores need."""
    wanted = load_task_type(task_type).outputs
    if lacking := [name for name in wanted if name not in found]:
        raise UserError(
            f"objective: `outputs` of a head for rows of {task_type} lacks "
            f"{', '.join(lacking)}; it returns {', '.join(found) or 'nothing'}"
        )


def with_options(objective: str, **options: registry.Option) -> str:
    """Append options to an objective.

    >>> with_options("lab.focal:gamma=3", classes=2)
    'lab.focal:gamma=3,classes=2'
    """
    for key, value in options.items():
        objective += f"{',' if ':' in objective else ':'}{key}={value}"
    return objective
