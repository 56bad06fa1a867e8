# SPDX-License-Identifier: Apache-2.0
"""What `bertjax.evaluate --json` printed, as tables."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bertjax import UserError
from bertjax.reporting.read_json import read_objects
from bertjax.reporting.run_tables import Table
from bertjax.scoring.lines import total

LINE = {"text", "score", "tokens", "words", "unknown"}  # keys of --what=pll's objects
Titled = tuple[str, Table]


def read_scores(name: str) -> list[Titled]:
    """Read a file's tables. Raises UserError where it is none.

    A file has an object, or one a line: lines that were scored, which are added up, or
    several evaluations.
    """
    read = read_objects(name, "--scores")
    tables: list[Titled] = []
    if all(one.keys() >= LINE for _, one in read):
        models: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
        for _, one in read:
            models.setdefault((one.get("model"), one.get("step")), []).append(one)
        try:
            for (model, step), lines in models.items():
                at_step = {} if step is None else {"step": step}
                tables += name_model(model, lay_out(at_step | total(lines)))
            return tables
        except (TypeError, AttributeError):
            raise refusal(name, 1, "scored lines of another kind") from None
    for number, one in read:
        if len(one) < 2 or "step" not in one:
            raise refusal(name, number, "no scores and their step in it")
        try:
            tables += name_model(one.pop("model", None), lay_out(one))
        except TypeError as e:
            raise refusal(name, number, str(e)) from None
    return tables


def name_model(model: str | None, tables: Iterable[Titled]) -> Iterator[Titled]:
    """Put the model before the titles; files of earlier versions do not name it."""
    for title, table in tables:
        yield ": ".join(filter(None, [model, title])), table


def refusal(name: str, number: int, why: str) -> UserError:
    """Make the error of a line that has no scores."""
    what = "nothing that bertjax.evaluate --json printed"
    return UserError(f"--scores={name}, line {number}: {what}: {why}")


def lay_out(values: Mapping[str, Any], title: str = "") -> Iterator[Titled]:
    """Yield (title, table): of an object's plain values, then of each of its parts.

    Parts that have plain values stand beside each other: more of them than values, each
    is a row, else a column. Raises TypeError for what scores are not made of.

    >>> [(title, *t) for title, t in lay_out({"f1": 0.5, "types": {"A": {"f1": 0.5}}})]
    [('', ['score', 'value'], [['f1', 0.5]]), ('types', ['', 'A'], [['f1', 0.5]])]
    """
    plain = {k: v for k, v in values.items() if not isinstance(v, dict)}
    for key, value in plain.items():
        if not isinstance(value, int | float | str | None):
            raise TypeError(f"{key} is no score")
    if plain:
        yield title, Table(["score", "value"], [[k, v] for k, v in plain.items()])
    for key, part in values.items():
        if not isinstance(part, dict):
            continue
        name = f"{title} {key}".strip()
        if not all(isinstance(one, dict) for one in part.values()):
            yield from lay_out(part, name)
            continue
        yield from beside(part, name)
        for own, one in part.items():
            deeper = {k: v for k, v in one.items() if isinstance(v, dict)}
            yield from lay_out(deeper, f"{name} {own}")


def beside(parts: Mapping[str, Mapping[str, Any]], title: str) -> Iterator[Titled]:
    """Yield the table of the plain values of parts, where there are some."""
    keys = dict.fromkeys(
        key for one in parts.values() for key in one if not isinstance(one[key], dict)
    )
    if len(parts) > len(keys) > 0:
        rows = [[name, *map(one.get, keys)] for name, one in parts.items()]
        yield title, Table(["", *keys], rows)
    elif keys:
        rows = [[key, *(one.get(key) for one in parts.values())] for key in keys]
        yield title, Table(["", *parts], rows)
