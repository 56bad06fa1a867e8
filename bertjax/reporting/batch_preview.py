# SPDX-License-Identifier: Apache-2.0
"""Format batches for people: rows, the sets of a task, a dry run of train."""

import html
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertjax import counted
from bertjax.data import rendering
from bertjax.data.features.base import PER_TOKEN
from bertjax.data.tokenizers.stream_vocab import streams_of
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.task_rows import Rows, say_counts


class RowPreview(NamedTuple):
    """A row of a batch: (name, line) pairs as text and as HTML."""

    heading: str
    lines: list[tuple[str, str]]
    markup: list[tuple[str, str]]


def preview_row(
    seen: Any, phase: Any, prepared: Any, step: int, row: int
) -> RowPreview:
    """Preview a row of a batch: the stages of a text, or the parts of a task's row.

    seen: the batch of this step, as `phase.inspect` returns it.
    """
    tokenizer = prepared.tokenizer
    heading = row_heading(seen, step, row, [*prepared.parts])
    plan = phase.plans[seen.located.component[row]]
    if isinstance(plan, Rows):
        batch = {name: values[row] for name, values in seen.batch.items()}
        lines = [*plan.describe(batch, int(seen.located.example[row]), tokenizer)]
        if cut := int(seen.truncated[row]):
            heading += f", cut by {counted(cut, 'token')}"
        return RowPreview(heading, lines, [(k, html.escape(v)) for k, v in lines])
    stages, color = rendering.row_stages(seen, tokenizer, row), sys.stdout.isatty()
    lines = [(s, rendering.to_text(t, s, color)) for s, t in stages.items()]
    markup = [(s, rendering.stage_html(t, s)) for s, t in stages.items()]
    for name, text in stream_lines(seen, tokenizer, row):
        lines.append((name, text))
        markup.append((name, html.escape(text)))
    return RowPreview(heading, lines, markup)


def stream_lines(seen: Any, tokenizer: Any, row: int) -> Iterator[tuple[str, str]]:
    """Yield (name, values of the row's tokens) for each stream of the batch."""
    vocabs, real = streams_of(tokenizer), seen.gathered["attention_mask"][row] > 0
    usual = {*PER_TOKEN}
    for name, ids in seen.gathered.items():
        if name.endswith("_ids") and name not in usual:
            stream = name.removesuffix("_ids")
            named = vocabs[stream].name if stream in vocabs else str
            yield stream, rendering.stream_text(ids[row][real], named)


def row_heading(seen: Any, step: int, row: int, names: Sequence[str]) -> str:
    """Name the step, the row, its example, and its pair labels."""
    component = names[seen.located.component[row]]
    heading = f"step {step}, row {row}: {component} {seen.located.example[row]}"
    for name in ("nsp", "sop"):
        if f"{name}_labels" in seen.batch:
            labels = seen.batch[f"{name}_labels"][row]
            if "cls_weights" in seen.batch:
                labels = labels[seen.batch["cls_weights"][row] > 0]
            heading += f", {name} {' '.join(map(str, np.atleast_1d(labels)))}"
    return heading


def row_lines(row: RowPreview) -> list[str]:
    """Return a row as lines, with the names in a column."""
    width = max(9, *(len(name) for name, _ in row.lines))
    return [row.heading, *(f"  {name:{width}} {line}" for name, line in row.lines)]


def set_summaries(config: Any, prepared: Any) -> dict[str, Any]:
    """Return {set: summary of its rows} for all sets of a task."""
    parts = {**prepared.parts, **prepared.valid}
    return {k: rows.plan(config.data.length).summary() for k, rows in parts.items()}


def set_lines(sets: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the sets' summaries."""
    for name, summary in sets.items():
        counts = dict(summary)
        rows, length, cut = map(counts.pop, ("rows", "length", "truncated_rows"))
        share = cut / max(rows, 1)
        yield f"{name}: {counted(rows, 'row')}, {cut:,} of them cut ({share:.1%})"
        sizes = counts.pop("row_tokens")
        yield (
            f"  tokens per row: median {sizes['median']}, 90% up to {sizes['p90']}, at "
            f"most {sizes['max']}; a row has room for {length}"
        )
        for what, values in counts.items():
            yield f"  {say_counts(what, values, most=50)}"


def dry_run_lines(run: Any) -> Iterator[str]:
    """Yield parameters, their shardings, the first batch and its first row.

    run: a bertjax.assembly.training_run.TrainingRun.
    """
    import jax

    from bertjax.parallel.sharding import path_name

    freeze = run.update.freeze
    for path, leaf in jax.tree_util.tree_leaves_with_path(run.update.params):
        name, frozen = path_name(path), ""
        if name in freeze:
            frozen = " frozen" + f": the first {freeze[name]}" * bool(freeze[name])
        yield f"{name:45} {leaf.shape!s:24} {leaf.sharding.spec}{frozen}"
    phase, prepared = run.batches.data.at(0), run.prepared
    seen = phase.inspect(0)
    for name, values in seen.batch.items():
        yield f"{name:45} {values.shape!s:24} {values.dtype}"
    if not tasks.is_task(run.config):
        ids = seen.batch["input_ids"][0]
        yield " ".join(prepared.tokenizer.pieces[i] for i in ids.ravel())
        return
    yield from row_lines(preview_row(seen, phase, prepared, 0, 0))
    yield from set_lines(set_summaries(run.config, prepared))
