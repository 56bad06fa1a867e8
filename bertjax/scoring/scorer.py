# SPDX-License-Identifier: Apache-2.0
"""Define scorers, and the common form of their scores.

A scorer is a module of this package, or a plug-in by its dotted name, with

    FLAGS    names of flags of bertjax.evaluate that it reads besides the shared ones
    score(args, path, flag) -> Scores

args: the flags; path: the model, or a checkpoint if --step is given; flag: "--model" or
"--workdir", whichever was given. It raises UserError for what it cannot score.
"""

import numbers
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from ml_collections.config_dict import ConfigDict

from bertjax import UserError, counted, registry
from bertjax.scoring import SUPPORT


class Scores(NamedTuple):
    """The scores of a model, for programs and for people.

    notes: lines for standard error, beside the objects of --json.
    """

    objects: Sequence[Mapping[str, Any]]
    lines: Sequence[str]
    notes: Sequence[str] = ()


def load_scorer(name: str) -> ModuleType:
    """Return the scorer of --what. Raises UserError if it is not one."""
    module = registry.load("--what", name, __package__, SUPPORT)
    if not (hasattr(module, "score") and hasattr(module, "FLAGS")):
        raise UserError(f"--what={name} is not a scorer: it needs `score` and `FLAGS`")
    return module


def scorer_names() -> list[str]:
    """Return the names that --what accepts, without importing the scorers."""
    return [name for name in registry.names(__package__) if name not in SUPPORT]


def text_to_score(args: Any, config: ConfigDict) -> tuple[str, str]:
    """Return --text, or otherwise the run's data.valid, with the name of the source.

    Raises UserError if both are empty.
    """
    text, key = (
        (args.text, "--text") if args.text else (config.data.valid, "data.valid")
    )
    if not text:
        raise UserError("data.valid is empty in this run's config: give --text=FILES")
    return text, key


def identify(args: Any, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scored model, as it was given, and its step.

    meta: the checkpoint's meta.json; an imported model's step is 0.
    """
    return {"model": args.workdir or args.model, "step": meta.get("step", 0)}


def heading(name: str, meta: Mapping[str, Any]) -> str:
    """Name a validation set and the step; an imported model has no step."""
    return f"{name} at step {meta['step']}" if "step" in meta else name


def join_sets(
    about: Mapping[str, Any], sets: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return one object: the values of the only set, or "eval": {name: values}."""
    return {**about, **({"eval": sets} if len(sets) > 1 else next(iter(sets.values())))}


def scores_of_sets(
    sets: Mapping[str, Mapping[str, Any]], args: Any, meta: Mapping[str, Any]
) -> Scores:
    """Return the scores of validation sets, given as {name: {metric: value}}."""
    lines = []
    for name, values in sets.items():
        lines += [f"{heading(name, meta)}:", *value_lines(values)]
    return Scores([join_sets(identify(args, meta), sets)], lines)


def value_lines(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each value; a nested value has one line per entry."""
    for key, value in values.items():
        if not isinstance(value, dict):
            yield f"  {key:24} {value:,.4f}".rstrip("0").rstrip(".")
            continue
        for part, scores in value.items():
            each = (f"{name} {number(score)}" for name, score in scores.items())
            yield f"  {key}: {part:17} {', '.join(each)}"


def number(value: float) -> str:
    """Format a number with four digits, or a whole number in full."""
    return f"{value:,}" if isinstance(value, numbers.Integral) else f"{value:,.4g}"


def two_columns(text: str, what: str) -> list[str]:
    """Return the two names of --columns. Raises UserError for another number."""
    names = registry.split_list(text)
    if len(names) != 2:
        raise UserError(
            f"--columns={text} has {counted(len(names), 'name')}: give two, {what}"
        )
    return names
