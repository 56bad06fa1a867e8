# SPDX-License-Identifier: Apache-2.0
"""The JSON of bertjax.probe, scores by layer, as charts and tables."""

from collections.abc import Sequence
from typing import Any

from bertjax import UserError, counted
from bertjax.probing.probe_table import COLUMNS, describe_mix
from bertjax.reporting.read_json import read_objects
from bertjax.reporting.run_tables import Table

# Of each chart: a key of the layers' rows -> what its curve is called.
SCORES = {"score": "encoder", "random": "random encoder", "control": "random labels"}
BITS = {"bits": "encoder", "random_bits": "random encoder"}


def read_probe(name: str) -> dict[str, Any]:
    """Read what `bertjax.probe --out` wrote. Raises UserError naming what is none.

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
                "charts": charts(probe, result),
                "table": table(probe, result["layers"]),
                "mix": describe_mix(result["mix"], probe["metric"]),
            }
            for kind, result in probe["probes"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
        lacks = isinstance(e, KeyError)
        why = f"it has no {e}" if lacks else "a value in it is of another kind"
        raise UserError(
            f"--probes={name} was not written by bertjax.probe --out: {why}"
        ) from e
    return {"file": name, "about": about, "kinds": kinds}


def charts(probe: dict[str, Any], result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return two charts by layer, as page.js draws them: scores, and code lengths."""
    rows = result["layers"]
    layers = [int(row["layer"]) for row in rows]

    def chart(key: str, names: dict[str, str], more: dict[str, Any]) -> dict[str, Any]:
        drawn = {
            name: [float(row[k]) for row in rows]
            for k, name in names.items()
            if k in rows[0]
        }
        drawn |= more
        curves = [
            {"run": i, "name": name, "layer": layers, "value": values}
            for i, (name, values) in enumerate(drawn.items())
        ]
        return {"key": key, "axis": "layer", "curves": curves}

    mix = {"mix of the layers 0 to l": [float(x) for x in result["mix"]["cumulative"]]}
    majority = float(probe["majority"])  # 0: one class alone tells the metric nothing
    common = {"largest class": [majority] * len(rows)} if majority else {}
    uniform = {"each class as likely": [float(probe["uniform_bits"])] * len(rows)}
    return [
        chart(probe["metric"], SCORES, mix | common),
        chart("bits of the online code", BITS, uniform),
    ]


def table(probe: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Table:
    """Lay the layers' rows out under the heads that `bertjax.probe` prints."""
    columns = {k: head for k, (head, _) in COLUMNS.items() if k in rows[0]}
    heads = [head.format(metric=probe["metric"]) for head in columns.values()]
    return Table(heads, [[row[k] for k in columns] for row in rows])
