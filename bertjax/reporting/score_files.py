# SPDX-License-Identifier: Apache-2.0
"""Read the output of `bertjax.evaluate --json` and `bertjax.probe --out`."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from bertjax import UserError, counted
from bertjax.probing.probe_table import COLUMNS, describe_mix
from bertjax.reporting.run_tables import Table
from bertjax.scoring.lines import total
from bertjax.storage.paths import expand

# keys of the objects of --what=pll
LINE = {"text", "score", "tokens", "words", "unknown"}
NO_JSON = ValueError, RecursionError  # RecursionError for too many brackets
Titled = tuple[str, Table]
# For each chart of probes: a key of the layers' rows -> the name of its curve.
SCORES = {"score": "encoder", "random": "random encoder", "control": "random labels"}
BITS = {"bits": "encoder", "random_bits": "random encoder"}


def read_objects(name: str, flag: str) -> list[tuple[int, dict[str, Any]]]:
    """Read the (line, object) pairs of a file: one object as a whole, or one per line.

    Raises UserError that names flag, file and line.
    """
    try:
        text = expand(name, flag).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{flag}={name}: there is no such file") from None
    except OSError as e:
        raise UserError(f"{flag}={name}: cannot be read ({e.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{flag}={name} is not text in UTF-8") from None
    objects: list[tuple[int, Any]] = []
    try:
        objects.append((1, json.loads(text)))
    except NO_JSON as whole:
        for number, line in enumerate(text.split("\n"), 1):
            try:
                if line.strip():
                    objects.append((number, json.loads(line)))
            except NO_JSON as e:
                # If no line is complete, one object spans several lines.
                at, fault = number, e
                if not objects:
                    at, fault = getattr(whole, "lineno", 1), whole
                why = getattr(fault, "msg", fault)
                raise UserError(
                    f"{flag}={name}, line {at} is not JSON: {why}"
                ) from None
    for number, one in objects:
        if not isinstance(one, dict):
            raise UserError(f"{flag}={name}, line {number} is not a JSON object")
    if not objects:
        raise UserError(f"{flag}={name}: the file is empty")
    return objects


def read_scores(name: str) -> list[Titled]:
    """Read a file's tables, titled by the model if the file names it.

    A file has one object, or one per line: several evaluations, or scored lines, which
    are added up by model and scorer. Raises UserError for other content.
    """
    objects = read_objects(name, "--scores")
    is_lines = all(one.keys() >= LINE for _, one in objects)
    if is_lines:
        models: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        try:
            for _, one in objects:
                key = one.get("model"), one.get("step"), one.get("scorer")
                models.setdefault(key, []).append(one)
            objects = []
            for (model, *rest), lines in models.items():
                about = zip(("step", "scorer"), rest, strict=True)
                labels = {k: v for k, v in about if v is not None}
                objects.append((1, {"model": model, **labels, **total(lines)}))
        except (TypeError, AttributeError, ArithmeticError):
            raise refusal(name, 1, "scored lines of another kind") from None
    tables: list[Titled] = []
    for number, one in objects:
        if not is_lines and (len(one) < 2 or "step" not in one):
            raise refusal(name, number, "no scores and their step in it")
        try:
            model = one.pop("model", None)
            for title, table in lay_out(one):
                tables.append((": ".join(filter(None, [model, title])), table))
        except TypeError as e:
            raise refusal(name, number, str(e)) from None
    return tables


def refusal(name: str, number: int, why: str) -> UserError:
    """Build the error for a line without scores."""
    what = "nothing that bertjax.evaluate --json printed"
    return UserError(f"--scores={name}, line {number}: {what}: {why}")


def lay_out(values: Mapping[str, Any], title: str = "") -> Iterator[Titled]:
    """Yield (title, table) for an object's plain values, then for each of its parts.

    Parts with plain values share a table: if there are more parts than
    values, each part is a row, otherwise a column. Raises TypeError for other
    types than scores have.

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
        if key in plain:
            continue
        name = f"{title} {key}".strip()
        if not all(isinstance(one, dict) for one in part.values()):
            yield from lay_out(part, name)
            continue
        keys = dict.fromkeys(
            k for one in part.values() for k in one if not isinstance(one[k], dict)
        )
        rows = [[own, *map(one.get, keys)] for own, one in part.items()]
        head = ["", *keys]
        if len(rows) <= len(keys):
            head, *rows = ([*column] for column in zip(head, *rows, strict=True))
        if keys and rows:
            yield name, Table(head, rows)
        for own, one in part.items():
            deeper = {k: v for k, v in one.items() if isinstance(v, dict)}
            yield from lay_out(deeper, f"{name} {own}")


def read_probe(name: str) -> dict[str, Any]:
    """Read the output of `bertjax.probe --out`. Raises UserError for other files.

    Returns {"file", "about", "kinds": {kind: {"charts", "table", "mix"}}}.
    """
    (_, probe), *_ = read_objects(name, "--probes")
    try:
        rows = probe["rows"]
        about = (
            f"{probe['model']}: {len(probe['labels'])} classes, {rows['train']:,} "
            f"{probe['of']} for the probes, {rows['valid']:,} for the "
            f"scores, {probe['pooling']} pooling; means over "
            f"{counted(probe['seeds'], 'seed')}."
        )
        kinds = {
            kind: {
                "charts": probe_charts(probe, result),
                "table": probe_table(probe, result["layers"]),
                "mix": describe_mix(result["mix"], probe["metric"]),
            }
            for kind, result in probe["probes"].items()
        }
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as e:
        lacks = isinstance(e, KeyError)
        why = f"it has no {e}" if lacks else "a value in it is of another kind"
        raise UserError(
            f"--probes={name} was not written by bertjax.probe --out: {why}"
        ) from e
    return {"file": name, "about": about, "kinds": kinds}


def probe_charts(probe: dict[str, Any], result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return two charts by layer for page.js: scores, and code lengths."""
    rows = result["layers"]
    layers = [int(row["layer"]) for row in rows]

    def chart(key: str, names: dict[str, str], more: dict[str, Any]) -> dict[str, Any]:
        named = [(k, name) for k, name in names.items() if k in rows[0]]
        drawn = {name: [float(row[k]) for row in rows] for k, name in named} | more
        curves = [
            {"run": i, "name": name, "layer": layers, "value": values}
            for i, (name, values) in enumerate(drawn.items())
        ]
        return {"key": key, "axis": "layer", "curves": curves}

    mix = {"mix of the layers 0 to l": [float(x) for x in result["mix"]["cumulative"]]}
    # 0: the metric is meaningless for a single class
    majority = float(probe["majority"])
    common = {"largest class": [majority] * len(rows)} if majority else {}
    uniform = {"each class as likely": [float(probe["uniform_bits"])] * len(rows)}
    return [
        chart(probe["metric"], SCORES, mix | common),
        chart("bits of the online code", BITS, uniform),
    ]


def probe_table(probe: dict[str, Any], rows: list[dict[str, Any]]) -> Table:
    """Arrange the layers' rows under the heads that `bertjax.probe` prints."""
    columns = {k: head for k, (head, _) in COLUMNS.items() if k in rows[0]}
    heads = [head.format(metric=probe["metric"]) for head in columns.values()]
    return Table(heads, [[row[k] for k in columns] for row in rows])
