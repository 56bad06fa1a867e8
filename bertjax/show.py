# SPDX-License-Identifier: Apache-2.0
"""Look at real batches: python -m bertjax.show --config=... [--step=N] [--batches=N]

Prints rows as they are gathered, chosen from and corrupted, decoded and coloured, and
statistics over the batches. `--json` prints the statistics alone, with the hash of
every batch; `--html=FILE` writes all of it as one page; `--examples=N` rows are shown;
`--hosts=N` makes each batch in N parts. Needs no accelerator and compiles nothing.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from bertjax import UserError, build, checks, disk
from bertjax import config as c


def define_flags(values: flags.FlagValues) -> None:
    integer = flags.DEFINE_integer
    integer("step", 0, "", lower_bound=0, upper_bound=2**40, flag_values=values)
    integer("batches", 1, "", lower_bound=1, flag_values=values)
    integer("hosts", 1, "", lower_bound=1, flag_values=values)
    integer("examples", 3, "", lower_bound=0, flag_values=values)
    flags.DEFINE_boolean("json", False, "", flag_values=values)
    flags.DEFINE_string("html", None, "", flag_values=values)


def main(argv: Sequence[str]) -> int:
    args = c.parse(argv, define_flags)
    config = args.config
    checks.check(config)
    build.check_inputs(config)
    for phase in c.wanted_phases(config):
        if phase.batch_size % args.hosts:
            raise UserError(
                f"--hosts={args.hosts} does not divide {phase.batch_size} rows"
            )
    page = disk.check_out(args.html, "--html") if args.html else None

    prepared = build.prepare(config, c.say)

    from bertjax.data import rendering
    from bertjax.data.pipeline import batch_sha256
    from bertjax.data.statistics import Statistics
    from bertjax.data.stream import stream
    from bertjax.objectives.base import make_objective

    tokenizer = prepared.tokenizer
    cfg = c.encoder_config(config, tokenizer.vocab_size)
    needs = make_objective(config.objective, cfg)[0].needs
    counts = build.count_tokens(prepared.parts)
    tables = build.make_tables(config, tokenizer, counts, c.say)
    run = build.make_run(config, needs, tokenizer, prepared.parts, tables, say=c.say)

    def make(step: int) -> dict[str, np.ndarray]:
        stage = run.course.at(step)
        share = stage.batch_size // args.hosts
        parts = [slice(h * share, (h + 1) * share) for h in range(args.hosts)]
        made = [stage.batch(step, rows) for rows in parts]
        return {name: np.concatenate([m[name] for m in made]) for name in made[0]}

    statistics = Statistics(tokenizer, tuple(prepared.parts))
    rows: list[tuple[str, Any]] = []
    stop = args.step + args.batches
    for step, batch in enumerate(
        stream(make, args.step, stop, config.data.engine), args.step
    ):
        seen = run.course.at(step).inspect(step)
        statistics.add(seen, batch_sha256(batch))
        for row in range(min(args.examples - len(rows), len(batch["input_ids"]))):
            heading = headline(seen, step, row, statistics.names)
            rows.append((heading, rendering.show_row(seen, tokenizer, row)))
    results = statistics.results()
    if page:
        text = rendering.to_html("Batches", results, rows)
        disk.write_whole(page, text.encode(), f"--html={args.html}")
        c.say(f"wrote {page}")
    if args.json:
        print(json.dumps(results))
        return 0
    for heading, tokens in rows:
        print(heading)
        for stage in rendering.STAGES:
            line = rendering.to_text(tokens, stage, colour=sys.stdout.isatty())
            print(f"  {stage:9} {line}")
    for key, value in results.items():
        print(f"{key:22} {value}")
    return 0


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


def describe(shapes: Any, shardings: Any, batch: Any, tokenizer: Any) -> None:
    """Print parameters, their shardings and the first row: train --dry_run."""
    import jax

    from bertjax.parallel.sharding import path_name

    for (at, leaf), where in zip(
        jax.tree_util.tree_leaves_with_path(shapes),
        jax.tree.leaves(shardings),
        strict=True,
    ):
        print(f"{path_name(at):45} {leaf.shape!s:24} {where.spec}")
    for name, rows in batch.items():
        print(f"{name:45} {rows.shape!s:24} {rows.dtype}")
    print(" ".join(tokenizer.pieces[i] for i in batch["input_ids"][0].ravel()))


if __name__ == "__main__":
    c.command(main)
