# SPDX-License-Identifier: Apache-2.0
"""A table of compression methods on one model: each result is scored."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from bertjax import UserError
from bertjax.compression.methods import BITS, METHODS, Recipe, make_recipe, read_bits
from bertjax.compression.write_model import Small, write_small

SPARSITIES = ("0.5", "0.6", "0.7", "2:4")
Row = dict[str, Any]


def make_grid(
    methods: Sequence[str],
    sparsities: Sequence[str],
    bits: Sequence[str],
    group_size: int | None,
    embeddings: str,
) -> list[Recipe]:
    """Return a recipe for each method and each sparsity or number of bits.

    An empty sequence selects all that are known. Raises UserError for unknown values,
    and for options that none of the methods reads.
    """
    recipes = []
    for method in methods or METHODS:
        found = METHODS.get(method)
        if found and found.prunes:
            for sparsity in sparsities or SPARSITIES:
                recipes.append(make_recipe(method, sparsity, embeddings=embeddings))
            continue
        for text in bits or map(str, BITS):
            how = read_bits(text), group_size, embeddings
            recipes.append(make_recipe(method, None, *how))
    prune = {METHODS[recipe.method].prunes for recipe in recipes}
    for flag, given, reader in (
        ("sparsity", sparsities, True),
        ("bits", bits, False),
        ("group_size", group_size, False),
    ):
        if given and reader not in prune:
            what = "prunes" if reader else "quantizes"
            raise UserError(
                f"--{flag}: of --method={','.join(methods)} none {what}: leave it out"
            )
    return [*dict.fromkeys(recipes)]


def run_grid(
    model: str,
    recipes: Sequence[Recipe],
    compress: Callable[[Recipe], Iterator[Small]],
    evaluate: str,
    metrics: Sequence[str],
    out: str | None,
    say: Callable[[str], None],
    weights: str = "",
) -> Iterator[list[Row]]:
    """Compress a model by each recipe, score the result, and yield the rows so far.

    The first row is that of the model itself. compress(recipe) yields the compressed
    model, and then, with recovery, the recovered model, which is another row. evaluate:
    flags of `python -m bertjax.evaluate`; metrics: keys of its output. out: the
    directory for the models; None: they are not kept. weights: which of the model's
    parameters are compressed, and scored for its own row. Raises UserError.
    """
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = out or stack.enter_context(tempfile.TemporaryDirectory())
        values = score(model, evaluate, metrics, weights)
        rows.append({"method": "dense", "degree": "", "values": values})
        for i, recipe in enumerate(recipes, 1):
            name = f"{recipe.method} {recipe.degree}"
            say(f"{name}, {i} of {len(recipes)}")
            for small in compress(recipe):
                after = ", recovered" if "recovery" in small.about else ""
                label = re.sub(r"[ ,]+", "-", name + after).replace("%", "")
                into = f"{folder}/{label}"
                done = write_small(small, into)
                values = score(into, evaluate, metrics)
                rows[0]["bytes"] = done["bytes_dense"]
                row = {"method": recipe.method, "degree": f"{recipe.degree}{after}"}
                rows.append({**row, "bytes": done["bytes"], "values": values})
                scores = ", ".join(f"{k} {v:.4f}" for k, v in values.items())
                say(f"{name}{after}: {scores}, {done['bytes'] / 1e6:.1f} MB")
                if out is None:
                    shutil.rmtree(into)
                yield rows


def score(
    model: str, evaluate: str, metrics: Sequence[str], weights: str = ""
) -> dict[str, float]:
    """Return metrics of a model as `python -m bertjax.evaluate` prints them.

    This runs in a separate process, so that its memory is freed afterwards.
    """
    command = [sys.executable, "-m", "bertjax.evaluate", f"--model={model}", "--json"]
    command += [f"--weights={weights}"] * bool(weights)
    done = subprocess.run(
        [*command, *shlex.split(evaluate)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise UserError(f"--evaluate={evaluate}: {why.removeprefix('error: ')}")
    lines = done.stdout.splitlines()
    if len(lines) != 1:
        raise UserError(
            f"--evaluate={evaluate}: it prints {len(lines)} objects, a line of text "
            "each, and a table has the numbers of one"
        )
    known = numbers(json.loads(lines[0]))
    for metric in metrics:
        if metric not in known:
            raise UserError(
                f"--metric={metric} is not among what is printed: {', '.join(known)}"
            )
    return {metric: known[metric] for metric in metrics}


def numbers(tree: Mapping[str, Any], above: str = "") -> dict[str, float]:
    """Return the numbers in an object by path, such as "wiki/mlm_loss"."""
    found: dict[str, float] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{above}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{above}{key}"] = value
    return found


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table in Markdown.

    It has bytes in MB (10^6) and as a fraction of the dense model's, and scores with
    their differences from the dense model's.
    """
    first = rows[0]
    names = list(first["values"])
    yield "| method | how far | MB | of dense | " + " | ".join(names) + " |"
    yield "|---|---|---|---|" + "---|" * len(names)
    for row in rows:
        size = row["bytes"]
        cells = [row["method"], row["degree"], f"{size / 1e6:.1f}"]
        cells.append(f"{size / first['bytes']:.3f}")
        for name in names:
            value = row["values"][name]
            off = f" ({value - first['values'][name]:+.4f})" if row is not first else ""
            cells.append(f"{value:.4f}{off}")
        yield f"| {' | '.join(cells)} |"
