# SPDX-License-Identifier: Apache-2.0
"""Look at real batches: python -m bertjax.show --config=... [--step=N] [--batches=N]

Prints decoded rows in color three times (as gathered, with the chosen tokens, and as
corrupted), and statistics over the batches. For a task it prints the model's input and
the right answer of rows, and for every set the number of cut rows, their lengths and
labels. `--json` prints only the statistics, with the hash of every batch (for a task
also the rows); `--html=FILE` writes everything as one page; `--examples=N` rows are
shown; `--hosts=N` makes each batch in N parts. It needs no accelerator and compiles
nothing.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.assembly import batches, command_line, prepared_text, resolve, validate
from bertjax.config import cli
from bertjax.config.flag_help import Flag
from bertjax.data import rendering
from bertjax.storage import atomic
from bertjax.tasks import prepare_task as tasks

FLAGS = {
    "step": Flag("step of the first batch", 0, least=0, most=2**40),
    "batches": Flag("number of batches", 1, least=1),
    "hosts": Flag("build each batch in this many parts, as hosts do", 1, least=1),
    "examples": Flag("rows to show per batch", 3, least=0),
    "json": Flag("print only the statistics, with the hash of every batch", False),
    "html": Flag("write everything to this HTML page"),
}


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, FLAGS, __doc__)
    config = args.config
    validate.check(config)
    prepared_text.check_inputs(config)
    for phase in resolve.wanted_phases(config):
        if phase.batch_size % args.hosts:
            raise UserError(
                f"--hosts={args.hosts} does not divide {phase.batch_size} rows"
            )
    if args.html:
        page = atomic.check_out(args.html, "--html")

    from bertjax.reporting.batch_preview import row_lines, set_lines

    # let objectives refuse the config before the text is read
    resolve.objectives_of(config)
    results, rows = inspect_batches(args)
    if args.html:
        markup = [(row.heading, row.markup) for row in rows]
        legend = "" if tasks.is_task(config) else rendering.LEGEND
        text = rendering.to_html(results, markup, legend)
        atomic.write_file(page, text, f"--html={args.html}")
        cli.say(f"wrote {page}")
    if args.json:
        examples = [{"row": row.heading} | dict(row.lines) for row in rows]
        shown = {"examples": examples} if tasks.is_task(config) else {}
        print(json.dumps(results | shown))
    else:
        for row in rows:
            print(*row_lines(row), sep="\n")
        for line in set_lines(results.pop("sets", {})):
            print(line)
        for key, value in results.items():
            print(f"{key:22} {value}")
    return 0


def inspect_batches(args: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return statistics over the batches, and RowPreviews of the first rows."""
    from bertjax.data.batch_statistics import OF_TEXT, Statistics
    from bertjax.data.batches import batch_sha256
    from bertjax.data.loader import stream
    from bertjax.reporting.batch_preview import preview_row, set_summaries

    config = args.config
    prepared = prepared_text.prepare(config, cli.say)
    tokenizer = prepared.tokenizer
    phased = batches.make_phased_batches(config, tokenizer, prepared.parts, cli.say)
    statistics, rows = Statistics(tokenizer, tuple(prepared.parts)), []
    steps = range(args.step, args.step + args.batches)

    def make(step: int) -> dict[str, np.ndarray]:  # from the parts of all hosts
        phase = phased.at(step)
        share = phase.batch_size // args.hosts
        slices = [slice(h * share, (h + 1) * share) for h in range(args.hosts)]
        parts = [phase.batch(step, rows) for rows in slices]
        return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}

    stream_of_batches = stream(make, steps.start, steps.stop, config.data.engine)
    for step, batch in zip(steps, stream_of_batches, strict=True):
        phase = phased.at(step)
        seen = phase.inspect(step)
        statistics.add(seen, batch_sha256(batch))
        for row in range(min(args.examples - len(rows), len(batch["input_ids"]))):
            rows.append(preview_row(seen, phase, prepared, step, row))
    results = statistics.results()
    if tasks.is_task(config):
        of_rows = {k: v for k, v in results.items() if k not in OF_TEXT}
        results = {"sets": set_summaries(config, prepared), **of_rows}
    return results, rows


if __name__ == "__main__":
    cli.command(main)
