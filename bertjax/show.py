# SPDX-License-Identifier: Apache-2.0
"""Look at real batches: python -m bertjax.show --config=... [--step=N] [--batches=N]

Prints rows as they are gathered, chosen from and corrupted, decoded and coloured, and
statistics over the batches. Of a task it prints what the model gets of a row and what
is right, and of every set how many rows are cut, how long they are, and their labels.
`--json` prints the statistics alone, with the hash of every batch (of a task the rows
too); `--html=FILE` writes all of it as one page; `--examples=N` rows are shown;
`--hosts=N` makes each batch in N parts. Needs no accelerator and compiles nothing.
"""

import html
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from bertjax import UserError, counted
from bertjax.assembly import batches, command_line, prepared_text, resolve, validate
from bertjax.config import cli
from bertjax.storage import atomic
from bertjax.tasks import prepare_task as tasks


def define_flags(values: flags.FlagValues) -> None:
    integer = flags.DEFINE_integer
    integer(
        "step",
        0,
        "the first batch",
        lower_bound=0,
        upper_bound=2**40,
        flag_values=values,
    )
    integer("batches", 1, "how many", lower_bound=1, flag_values=values)
    integer(
        "hosts",
        1,
        "make each batch in so many parts",
        lower_bound=1,
        flag_values=values,
    )
    integer("examples", 3, "rows that are shown", lower_bound=0, flag_values=values)
    flags.DEFINE_boolean(
        "json",
        False,
        "print the statistics alone, with the hash of every batch",
        flag_values=values,
    )
    flags.DEFINE_string("html", None, "write it all as one page", flag_values=values)


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, define_flags)
    config = args.config
    validate.check(config)
    prepared_text.check_inputs(config)
    for phase in resolve.wanted_phases(config):
        if phase.batch_size % args.hosts:
            raise UserError(
                f"--hosts={args.hosts} does not divide {phase.batch_size} rows"
            )
    page = atomic.check_out(args.html, "--html") if args.html else None

    from bertjax.objectives.base import make_objective

    # Of a model with one piece: what can be refused before the text is read.
    needs = make_objective(config.objective, resolve.encoder_config(config, 1))[0].needs
    resolve.check_plan(config, needs)
    prepared = prepared_text.prepare(config, cli.say)

    from bertjax.data import rendering
    from bertjax.data.batch_statistics import OF_TEXT, Statistics
    from bertjax.data.batches import batch_sha256
    from bertjax.data.loader import stream

    tokenizer = prepared.tokenizer
    counts = prepared_text.count_tokens(prepared.parts)
    tables = batches.make_tables(config, tokenizer, counts, cli.say)
    run = batches.make_run(
        config, needs, tokenizer, prepared.parts, tables, say=cli.say
    )

    def make(step: int) -> dict[str, np.ndarray]:
        stage = run.course.at(step)
        share = stage.batch_size // args.hosts
        parts = [slice(h * share, (h + 1) * share) for h in range(args.hosts)]
        made = [stage.batch(step, rows) for rows in parts]
        return {name: np.concatenate([m[name] for m in made]) for name in made[0]}

    statistics = Statistics(tokenizer, tuple(prepared.parts))
    rows: list[Shown] = []
    stop = args.step + args.batches
    for step, batch in enumerate(
        stream(make, args.step, stop, config.data.engine), args.step
    ):
        seen = run.course.at(step).inspect(step)
        statistics.add(seen, batch_sha256(batch))
        for row in range(min(args.examples - len(rows), len(batch["input_ids"]))):
            plan = run.course.at(step).plans[seen.found.component[row]]
            heading = headline(seen, step, row, statistics.names)
            rows.append(show_row(seen, plan, tokenizer, row, heading))
    results = statistics.results()
    if is_task := tasks.is_task(config):
        kept = {k: v for k, v in results.items() if k not in OF_TEXT}
        results = {"sets": summaries(config, prepared), **kept}
    if page:
        told = [(row.heading, row.markup) for row in rows]
        legend = "" if is_task else rendering.LEGEND
        text = rendering.to_html("Batches", results, told, legend)
        atomic.write_file(page, text, f"--html={args.html}")
        cli.say(f"wrote {page}")
    if args.json:
        told = [{"row": row.heading} | dict(row.lines) for row in rows]
        print(json.dumps(results | ({"examples": told} if is_task else {})))
        return 0
    for row in rows:
        print_row(row)
    for name, summary in results.pop("sets", {}).items():
        print("\n".join(describe_set(name, summary)))
    for key, value in results.items():
        print(f"{key:22} {value}")
    return 0


class Shown(NamedTuple):
    """A row for people: (name, line) pairs as text and as HTML."""

    heading: str
    lines: list[tuple[str, str]]
    markup: list[tuple[str, str]]


def show_row(seen: Any, plan: Any, tokenizer: Any, row: int, heading: str) -> Shown:
    """Tell a row of a batch: of a plan of text its stages, of a task's its parts."""
    from bertjax.data import rendering
    from bertjax.tasks.task_rows import Rows

    if isinstance(plan, Rows):
        batch = {name: values[row] for name, values in seen.batch.items()}
        lines = [*plan.tell(batch, int(seen.found.example[row]), tokenizer)]
        if cut := int(seen.truncated[row]):
            heading += f", cut by {counted(cut, 'token')}"
        return Shown(heading, lines, [(k, html.escape(v)) for k, v in lines])
    tokens, colour = rendering.show_row(seen, tokenizer, row), sys.stdout.isatty()
    lines = [(s, rendering.to_text(tokens, s, colour)) for s in rendering.STAGES]
    return Shown(heading, lines, rendering.stages_html(tokens))


def print_row(row: Shown) -> None:
    """Print a row, its names in a column."""
    print(row.heading)
    width = max(9, *(len(name) for name, _ in row.lines))
    for name, line in row.lines:
        print(f"  {name:{width}} {line}")


def summaries(config: Any, prepared: Any) -> dict[str, Any]:
    """Return what the rows of every set of a task are, by the set's name."""
    parts = {**prepared.parts, **prepared.valid}
    return {k: rows.plan(config.data.length).summary() for k, rows in parts.items()}


def describe_set(name: str, summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a set's summary."""
    from bertjax.tasks.task_rows import say_counts

    told = dict(summary)
    rows, length, cut = map(told.pop, ("rows", "length", "truncated_rows"))
    share = cut / max(rows, 1)
    yield f"{name}: {counted(rows, 'row')}, {cut:,} of them cut ({share:.1%})"
    sizes = told.pop("row_tokens")
    yield (
        f"  tokens a row: median {sizes['median']}, 90% up to {sizes['p90']}, at most "
        f"{sizes['max']}; a row has room for {length}"
    )
    for what, counts in told.items():
        yield f"  {say_counts(what, counts, most=50)}"


def headline(seen: Any, step: int, row: int, names: Sequence[str]) -> str:
    """Say where a row comes from and what is asked about it."""
    component = names[seen.found.component[row]]
    said = f"step {step}, row {row}: {component} {seen.found.example[row]}"
    for name in ("nsp", "sop"):
        if f"{name}_labels" in seen.batch:
            labels = seen.batch[f"{name}_labels"][row]
            if "cls_weights" in seen.batch:
                labels = labels[seen.batch["cls_weights"][row] > 0]
            said += f", {name} {' '.join(map(str, np.atleast_1d(labels)))}"
    return said


def describe(
    shapes: Any, shardings: Any, course: Any, config: Any, prepared: Any
) -> None:
    """Print parameters, their shardings and the first row: train --dry_run."""
    import jax

    from bertjax.parallel.sharding import path_name

    for (at, leaf), where in zip(
        jax.tree_util.tree_leaves_with_path(shapes),
        jax.tree.leaves(shardings),
        strict=True,
    ):
        print(f"{path_name(at):45} {leaf.shape!s:24} {where.spec}")
    seen, tokenizer = course.at(0).inspect(0), prepared.tokenizer
    for name, rows in seen.batch.items():
        print(f"{name:45} {rows.shape!s:24} {rows.dtype}")
    if not tasks.is_task(config):
        ids = seen.batch["input_ids"][0]
        print(" ".join(tokenizer.pieces[i] for i in ids.ravel()))
        return
    plan = course.at(0).plans[seen.found.component[0]]
    heading = headline(seen, 0, 0, tuple(prepared.parts))
    print_row(show_row(seen, plan, tokenizer, 0, heading))
    for name, summary in summaries(config, prepared).items():
        print("\n".join(describe_set(name, summary)))


if __name__ == "__main__":
    cli.command(main)
