# SPDX-License-Identifier: Apache-2.0
"""All of GLUE in one command: python -m bertjax.glue --workdir=DIR

    [--data=GLUE_DIR] [--tasks=cola,rte,...] [--seeds=5] [--lrs=2e-5,3e-5] [--json]
    --config=finetune/classify.py --config.init_from=MODEL [--config.KEY=VALUE ...]

The text comes from the folders that gluebenchmark.com's files unpack to (such as
GLUE_DIR/CoLA/train.tsv), or from TensorFlow Datasets on this machine; what is not found
is said. Each task is a sweep (bertjax.sweep) in DIR/TASK. DIR then holds glue.json,
glue.md and, where test files are, submission/*.tsv as the site takes them. Repeat to
resume.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from bertjax import UserError, registry, sweep
from bertjax import config as c
from bertjax.predict import answer, open_finetuned
from bertjax.tasks.catalog import TASKS, Files, Task
from bertjax.tasks.tables import read_rows
from bertjax.training.signals import Stopped, StopSignal

GLUE = {name: task for name, task in TASKS.items() if task.files is not None}
LEFT_OUT = ("wnli",)  # of the average, as Devlin et al. 2019, table 1


def define_flags(values: flags.FlagValues) -> None:
    sweep.define_flags(values)
    flags.DEFINE_string("data", "", "", flag_values=values)
    flags.DEFINE_list("tasks", list(GLUE), "", flag_values=values)


def main(argv: Sequence[str]) -> int:
    stop = StopSignal()
    stop.install()
    args = c.parse(argv, define_flags)
    for name in args.tasks:
        registry.pick("--tasks", name, GLUE)
    if not args.workdir:
        raise UserError("--workdir is missing: the directory the results lie in")
    folder = Path(args.data).expanduser() if args.data else None
    if folder and not folder.is_dir():
        raise UserError(f"--data={args.data} is no directory")
    path = Path(args.workdir).expanduser()
    asked = c.config_arguments(argv)
    rows, lacking = [], {}
    for name in args.tasks:
        task = GLUE[name]
        try:
            there = find(task, folder)
        except UserError as e:
            lacking[name] = str(e)
            c.say(f"{name}: not found: {e}")
            continue
        c.say(f"{name}:")
        given = [*asked, f"--config.task.name={name}", *there]
        own = path / name
        try:
            found = sweep.run(given, args.seeds, args.lrs, args.at_once, own, stop)
        except Stopped as e:
            return e.status
        rows += table(name, task, found)
        if folder:
            hand_in(task, folder / task.files.folder, path, own)
    if not rows:
        raise UserError("no task was found: " + "; ".join(lacking.values()))
    results = {"tasks": rows, "not_found": lacking, "average": average(rows)}
    (path / "glue.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    lines = [*markdown(results)]
    (path / "glue.md").write_text("\n".join(lines) + "\n", "utf-8")
    print(json.dumps(results) if args.json else "\n".join(lines))
    return 0


def find(task: Task, folder: Path | None) -> list[str]:
    """Return the arguments that name a task's text. UserError where it is not."""
    if folder is None:
        from bertjax.data.text.datasets import open_split

        open_split(task.train, {task.label: "task.label"})
        return []
    named = task.files
    train = table_file(folder / named.folder, "train.tsv")
    valid = {k: table_file(folder / named.folder, v) for k, v in named.valid.items()}
    only = len(valid) == 1
    told = ",".join(f"{v}" if only else f"{k}={v}" for k, v in valid.items())
    keys = {"data.train": train, "data.valid": told} | task_keys(named, named.columns)
    return [f"--config.{key}={value}" for key, value in keys.items()]


def table_file(folder: Path, name: str) -> Path:
    """Return a file, or the same with .gz. Raises UserError where there is none."""
    for file in (folder / name, folder / f"{name}.gz"):
        if file.is_file():
            return file
    raise UserError(f"{folder / name} is not there")


def task_keys(named: Files, columns: Sequence[str]) -> dict[str, str]:
    """Return the keys of config.task in which files differ from the task's own."""
    keys = dict(zip(("task.text", "task.text_pair"), columns, strict=False))
    keys |= {"task.label": named.label, "task.labels": ",".join(named.labels)}
    return {key: value for key, value in keys.items() if value}


def table(name: str, task: Task, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for every validation set and metric of a task.

    Of the rates the one whose median of the first metric is highest.
    """
    first = [r for r in found["spread"] if r["metric"] == task.metrics[0]]
    rate = max(first, key=lambda row: row["median"])["lr"]
    return [
        {"task": name, **row}
        for row in found["spread"]
        if row["lr"] == rate and row["metric"] in task.metrics
    ]


def average(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean over tasks of the mean of a task's medians, WNLI left out."""
    tasks: dict[str, list[float]] = {}
    for row in rows:
        if row["task"] not in LEFT_OUT:
            tasks.setdefault(row["task"], []).append(row["median"])
    means = [statistics.fmean(values) for values in tasks.values()]
    return statistics.fmean(means) if means else None


def markdown(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| task | set | metric | lr | n | median | std | min | max |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in results["tasks"]:
        std = "one seed" if row["std"] is None else f"{100 * row['std']:.2f}"
        numbers = (f"{100 * row[key]:.2f}" for key in ("min", "max"))
        yield (
            f"| {row['task']} | {row['valid']} | {row['metric']} | {row['lr']:g} | "
            f"{row['n']} | {100 * row['median']:.2f} | {std} | {' | '.join(numbers)} |"
        )
    names = {r["task"] for r in results["tasks"]} - {*LEFT_OUT}
    if results["average"] is not None:
        yield ""
        yield f"Mean of {len(names)} tasks' medians: {100 * results['average']:.2f}"
    for name, why in results["not_found"].items():
        yield f"Not found: {name} ({why})"


def hand_in(task: Task, folder: Path, path: Path, model: Path) -> None:
    """Write the best run's answers to a task's test files, where there are some."""
    named = task.files
    columns = named.test_columns or named.columns or task.columns
    opened = open_finetuned(str(model))
    opened = opened._replace(form=opened.form._replace(columns=columns))
    for name, file in named.test.items():
        try:
            test = table_file(folder, file)
        except UserError:
            continue
        keys = dict(zip(("task.text", "task.text_pair"), columns, strict=False))
        rows = read_rows(str(test), "--data", keys, c.say)
        lines = ["index\tprediction"]
        for i, one in enumerate(answer(opened, rows)):
            said = one["label"] if "label" in one else f"{one['value']:.3f}"
            lines.append(f"{i}\t{said}")
        out = path / "submission" / named.submit[name]
        out.parent.mkdir(exist_ok=True)
        out.write_text("\n".join(lines) + "\n", "utf-8")
        c.say(f"wrote {out}")


if __name__ == "__main__":
    c.command(main)
