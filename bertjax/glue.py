# SPDX-License-Identifier: Apache-2.0
"""Run all of GLUE in one command: python -m bertjax.glue --workdir=DIR

    [--data=GLUE_DIR] [--tasks=cola,rte,...] [--seeds=5] [--lrs=2e-5,3e-5] [--json]
    --config=finetune/classify.py --config.init_from=MODEL [--config.KEY=VALUE ...]

The data comes from the folders that gluebenchmark.com's files unpack to (such as
GLUE_DIR/CoLA/train.tsv), or from TensorFlow Datasets on this machine; missing tasks are
reported. Each task is a sweep (bertjax.sweep) in DIR/TASK. DIR then has glue.json,
glue.md and, for available tests, submission/*.tsv as the site accepts them. If a task
fails, or its test cannot be read, the command reports it, continues with the others and
ends with status 2. Repeat the command to resume.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertjax import UserError, registry, sweep
from bertjax.assembly import command_line
from bertjax.checkpoints import manifest
from bertjax.config import cli
from bertjax.config.arguments import split_arguments
from bertjax.config.flag_help import Flag
from bertjax.inference.predict_rows import answer, open_finetuned
from bertjax.storage import atomic
from bertjax.storage.paths import expand
from bertjax.tasks import glue_files
from bertjax.tasks.catalog import TASKS, Task
from bertjax.tasks.tables import read_rows
from bertjax.training.signals import Stopped, StopSignal

GLUE = {name: task for name, task in TASKS.items() if task.files is not None}
LEFT_OUT = ("wnli",)  # from the average, as in Devlin et al. 2019, table 1
TROUBLES = {  # key of glue.json -> its name in messages
    "not_found": "not found",
    "failed": "failed",
    "not_handed_in": "no answers to its tests",
}


FLAGS = {
    **sweep.FLAGS,
    "data": Flag("folder with GLUE's files; default: TensorFlow Datasets", ""),
    "tasks": Flag("tasks to run, separated by commas", list(GLUE)),
}


def main(argv: Sequence[str]) -> int:
    stop = StopSignal()
    stop.install()
    args = command_line.parse(argv, FLAGS, __doc__)
    for name in args.tasks:
        registry.pick("--tasks", name, GLUE)
    if len({*args.tasks}) < len(args.tasks):
        raise UserError(f"--tasks={','.join(args.tasks)}: give each task once")
    if not args.workdir:
        raise UserError("--workdir is missing: name a directory for the results")
    folder = expand(args.data, "--data") if args.data else None
    if folder and not folder.is_dir():
        raise UserError(f"--data={args.data} is not a directory")
    path = manifest.local_workdir(args.workdir)
    rows: list[dict[str, Any]] = []
    troubles: dict[str, dict[str, str]] = {what: {} for what in TROUBLES}
    for name in args.tasks:
        task, own, trouble = GLUE[name], path / name, "not_found"
        try:
            text = glue_files.train_arguments(task, folder, path / "text", cli.say)
            cli.say(f"{name}:")
            trouble = "failed"
            given = split_arguments(argv)[0]
            given += [f"--config.task.name={name}", *text]
            found = sweep.run(given, args.seeds, args.lrs, args.at_once, own, stop)
            rows += table(name, task, found)
            trouble = "not_handed_in"
            write_submission(task, folder, path, own)
        except Stopped as e:
            return e.status
        except UserError as e:
            troubles[trouble][name] = str(e)
            cli.say(f"{name}: {TROUBLES[trouble]}: {e}")
    if not rows:
        reasons = (troubles["not_found"] | troubles["failed"]).items()
        what = "finished" if troubles["failed"] else "was found"
        raise UserError(f"no task {what}: {'; '.join(f'{k}: {v}' for k, v in reasons)}")
    results = {"tasks": rows, "average": average(rows), **troubles}
    as_table = "\n".join(markdown(results))
    write(path / "glue.json", json.dumps(results, indent=1), path)
    write(path / "glue.md", as_table, path)
    print(json.dumps(results) if args.json else as_table)
    ends = [what for what in ("failed", "not_handed_in") if troubles[what]]
    ends = [f"{TROUBLES[k]} (see above): {', '.join(troubles[k])}" for k in ends]
    if ends:
        raise UserError("; ".join(ends))
    return 0


def write(out: Path, text: str, path: Path) -> None:
    """Write a file of the workdir, whole or not at all. Raises UserError."""
    atomic.write_file(out, f"{text}\n", f"--workdir={path}: {out}")


def table(name: str, task: Task, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for every validation set and metric of a task.

    Of several learning rates it takes the one with the highest median of the first
    metric, on the validation set that selected the best run.
    """
    of = found["best"]["valid"], task.metrics[0]
    first = [r for r in found["spread"] if (r["valid"], r["metric"]) == of]
    # the others have no median: a run of theirs is lost
    known = [row for row in first if row["median"] is not None]
    rate = max(known, key=lambda row: row["median"])["lr"]
    rows = [row for row in found["spread"] if row["lr"] == rate]
    return [{"task": name, **row} for row in rows if row["metric"] in task.metrics]


def average(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean over tasks of each task's mean of medians, without WNLI."""
    tasks: dict[str, list[float]] = {}
    for row in rows:
        if row["task"] not in LEFT_OUT and row["median"] is not None:
            tasks.setdefault(row["task"], []).append(row["median"])
    means = [statistics.fmean(values) for values in tasks.values()]
    return statistics.fmean(means) if means else None


def markdown(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the results as a Markdown table."""
    yield "| task | set | metric | lr | n | median | std | min | max |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in results["tasks"]:
        cells = [
            "-" if row[key] is None else f"{100 * row[key]:.2f}"
            for key in ("median", "std", "min", "max")
        ]
        if row["n"] == 1 and not row["lost"]:
            cells[1] = "one seed"
        yield (
            f"| {row['task']} | {row['valid']} | {row['metric']} | {row['lr']:g} | "
            f"{row['n']} | {' | '.join(cells)} |"
        )
    names = {r["task"] for r in results["tasks"]} - {*LEFT_OUT}
    if results["average"] is not None:
        yield ""
        yield f"Mean of {len(names)} tasks' medians: {100 * results['average']:.2f}"
    for what, called in TROUBLES.items():
        for name, why in results[what].items():
            yield f"{called.capitalize()}: {name} ({why})"


def write_submission(task: Task, folder: Path | None, path: Path, model: Path) -> None:
    """Write the best run's answers to a task's tests, if there are any.

    folder: the benchmark's own files; None: TensorFlow Datasets, which has the rows in
    another order. Raises UserError.
    """
    files, columns = task.files, task.columns
    if folder:
        columns = files.test_columns or files.columns or columns
    opened = open_finetuned(str(model))
    opened = opened._replace(form=opened.form._replace(columns=columns))
    labels = opened.form.labels
    # as the site names them
    names = dict(zip(labels, files.labels or labels, strict=False))
    keys = dict(zip(("task.text", "task.text_pair"), columns, strict=False))
    keys |= {} if folder else {"--data": "idx"}
    for name, source in glue_files.test_sources(task, folder, cli.say).items():
        out = path / "submission" / files.file_to_submit(name)
        try:
            rows = read_rows(source, "--data", keys, cli.say)
        except UserError as e:
            if folder:
                raise
            cli.say(f"no {out.name}: {e}")
            continue
        cells = {}
        numbers = glue_files.row_numbers(rows)
        for i, one in zip(numbers, answer(opened, rows), strict=True):
            cells[i] = f"{one['value']:.3f}" if "value" in one else names[one["label"]]
        lines = [f"{i}\t{cells[i]}" for i in sorted(cells)]
        write(out, "\n".join(["index\tprediction", *lines]), path)
        cli.say(f"wrote {out}")


if __name__ == "__main__":
    cli.command(main)
