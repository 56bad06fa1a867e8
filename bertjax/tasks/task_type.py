# SPDX-License-Identifier: Apache-2.0
"""What a task type is, and how the one that an objective learns from is found.

A type is a module of bertjax/tasks/types, or any dotted name, with a `TASK_TYPE`. The
name of the type is the name of its shipped objective; a head from outside names its
type itself (`Head.task_type`, objectives/base.py).
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
    """How the labelled rows of an objective are read, learnt from, scored and answered.

    Reading and rows:
      read(value, key, columns, say) -> the examples of the files that a config value
        names; parse(text, name, columns, say) -> those of standard input; parse_lines:
        as parse, of plain text, a text a line; None where a row is more than a text.
      make_rows(examples, form, tokenizer, labelled, say) -> Rows.
      find_labels(examples, form) -> the form, with the names of its classes.
      locate(entry, key) -> the file that an entry of a source names.
      file_names: what a message writes in the place of a directory.
      make_graph(config, train, others, say) -> what the rows of all sets share
        (Form.graph), of their examples; open_graph(config, facts) -> that of a model,
        whose checkpoint keeps these facts of the task. make_tokenizer(graph) -> the
        vocabulary, where it is the graph's.
    Scores:
      metrics: names that task.metrics may have; default_metrics: those that count where
        it has none, () for all. outputs: the names that `outputs` of a head must
        return, by which rows are scored and answered.
    Config:
      label_key: the key of config.task that names the column of what is right.
      columns: keys of config.task that need not be given, and what they then are.
      instead: keys of `columns` that stay empty where another key is given.
      unused: keys of config.task without effect, and the one value that they may have
        beside "". settings: those that other types have no use for; needs: of these
        those that have no effect where another key is empty, {key: that key}.
        check(config) refuses what else is wrong in config.task. imported(labels) ->
        keys of config.task for a model that was finetuned elsewhere. max_length: of its
        rows.
      text_columns: how many texts --columns names; name_columns(config, names) -> the
        texts' names, where --columns names more than texts.
      head_options(task, labels) -> options of the head's make_head, {"classes": 3}; no
        labels: they are not read yet, and a size that they say is left out;
        several_sequences: a row has as many as the head's option `choices` says.
      form_settings(task) -> what rows have to know of config.task beside columns
        (Form.settings), a tuple; None: nothing. Raises UserError.
    Models:
      facts(config) -> what a checkpoint keeps beside the labels.
      makes_vectors: the head makes vectors, which embed gives and a search compares,
        and no answers; has_threshold: answers may be withheld (predict --threshold);
        generates: labels are texts, and answers too, which the head over the
        vocabulary learns (Form.targets); masks: the host half of the objective hides
        what is predicted, as the keys of config.data say that are about masks.
      token_head: the head is the one over the vocabulary, whatever its parameters are.
      hf_class: what ends the name of transformers' class that computes the same of
        heads.init_task's parameters, and that convert writes; "" for none.
      exported: keys of config.task that config.json of an exported model keeps, of a
        type that opens there as another one; None: all that have an effect.
    """

    read: Callable[..., Sequence[Any]] = tables.read_rows
    parse: Callable[..., Sequence[Any]] = tables.parse_text
    make_rows: Callable[..., Rows]
    metrics: tuple[str, ...]
    default_metrics: tuple[str, ...] = ()
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
    """Return the `head_options` of a head with a class for each label."""
    return {"classes": len(labels)} if labels else {}


@functools.cache
def task_type_names() -> list[str]:
    """List the types of the package, whose shipped objectives have the same names."""
    return registry.names(PACKAGE)


def load_task_type(name: str, key: str = "task_type") -> TaskType:
    """Return the type of that name, or of the module of that dotted name: UserError."""
    module = registry.load(key, name, PACKAGE)
    if not isinstance(getattr(module, "TASK_TYPE", None), TaskType):
        raise UserError(f"{key}={name!r}: the module has no TASK_TYPE, a TaskType")
    return module.TASK_TYPE


def shipped_task_type(objective: str) -> TaskType | None:
    """Return the type of a shipped objective; of others None, and nothing is loaded."""
    name = objective.partition(":")[0]  # without its options
    return load_task_type(name) if name in task_type_names() else None


def find_task_type(objective: str) -> TaskType | None:
    """Return the type of the rows that an objective learns from; None: no labels.

    A head from outside the package is imported, and says it. Raises UserError.
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
    """Return the type of the rows that an objective learns from. Raises UserError."""
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
    """Raise UserError where a head's `outputs` lacks what rows are scored by."""
    wanted = load_task_type(task_type).outputs
    if lacking := [name for name in wanted if name not in found]:
        raise UserError(
            f"objective: `outputs` of a head for rows of {task_type} lacks "
            f"{', '.join(lacking)}; it returns {', '.join(found) or 'nothing'}"
        )


def with_options(objective: str, **options: registry.Option) -> str:
    """Give an objective options, after its own.

    >>> with_options("lab.focal:gamma=3", classes=2)
    'lab.focal:gamma=3,classes=2'
    """
    for key, value in options.items():
        objective += f"{',' if ':' in objective else ':'}{key}={value}"
    return objective
