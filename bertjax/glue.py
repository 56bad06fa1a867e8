# SPDX-License-Identifier: Apache-2.0
"""All of GLUE in one command: python -m bertjax.glue --workdir=DIR

    [--data=GLUE_DIR] [--tasks=cola,rte,...] [--seeds=5] [--lrs=2e-5,3e-5] [--json]
    --config=finetune/classify.py --config.init_from=MODEL [--config.KEY=VALUE ...]

The text comes from the folders that gluebenchmark.com's files unpack to (such as
GLUE_DIR/CoLA/train.tsv), or from TensorFlow Datasets on this machine; what is not found
is said. Each task is a sweep (bertjax.sweep) in DIR/TASK. DIR then holds glue.json,
glue.md and, of tests that are there, submission/*.tsv as the site takes them. A task
that fails, or whose test cannot be read, is said and the others go on; the exit status
is then 2. Repeat to resume.
"""

import contextlib
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from bertjax import UserError, counted, registry, sweep
from bertjax.assembly import command_line
from bertjax.config import cli
from bertjax.config import flags as config_flags
from bertjax.data.corpus.sources import named_sources
from bertjax.predict import answer, open_finetuned
from bertjax.storage import atomic
from bertjax.tasks import catalog
from bertjax.tasks.catalog import TASKS, Files, Task
from bertjax.tasks.tables import Row, read_rows, read_text
from bertjax.training.signals import Stopped, StopSignal

GLUE = {name: task for name, task in TASKS.items() if task.files is not None}
AX = f"{catalog.GLUE.format('ax')}:test"
LEFT_OUT = ("wnli",)  # of the average, as Devlin et al. 2019, table 1
TROUBLES = {  # what a task met, and how that is said
    "not_found": "not found",
    "failed": "failed",
    "not_handed_in": "no answers to its tests",
}
NUMBERS = ("index", "id", "idx")  # columns of a test: of the files, QQP's, TFDS's


def define_flags(values: flags.FlagValues) -> None:
    sweep.define_flags(values)
    flags.DEFINE_string(
        "data",
        "",
        "the folder with GLUE's own; unless given TensorFlow Datasets",
        flag_values=values,
    )
    flags.DEFINE_list(
        "tasks", list(GLUE), "some of them, with commas", flag_values=values
    )


def main(argv: Sequence[str]) -> int:
    stop = StopSignal()
    stop.install()
    args = command_line.parse(argv, define_flags)
    for name in args.tasks:
        registry.pick("--tasks", name, GLUE)
    if not args.workdir:
        raise UserError("--workdir is missing: the directory the results lie in")
    folder = Path(args.data).expanduser() if args.data else None
    if folder and not folder.is_dir():
        raise UserError(f"--data={args.data} is no directory")
    path = Path(args.workdir).expanduser().absolute()
    asked = config_flags.config_arguments(argv)
    rows: list[dict[str, Any]] = []
    troubles: dict[str, dict[str, str]] = {what: {} for what in TROUBLES}
    for name in args.tasks:
        task, own, trouble = GLUE[name], path / name, "not_found"
        try:
            there = find(task, folder)
            cli.say(f"{name}:")
            trouble = "failed"
            given = [*asked, f"--config.task.name={name}"]
            given += arguments(task, there, path / "text")
            found = sweep.run(given, args.seeds, args.lrs, args.at_once, own, stop)
            rows += table(name, task, found)
            trouble = "not_handed_in"
            hand_in(task, folder and folder / task.files.folder, path, own)
        except Stopped as e:
            return e.status
        except UserError as e:
            troubles[trouble][name] = str(e)
            cli.say(f"{name}: {TROUBLES[trouble]}: {e}")
    if not rows:
        lacking = troubles["not_found"] | troubles["failed"]
        told = [f"{name}: {why}" for name, why in lacking.items()]
        what = "came to its end" if troubles["failed"] else "was found"
        raise UserError(f"no task {what}: {'; '.join(told)}")
    results = {"tasks": rows, "average": average(rows), **troubles}
    lines = [*markdown(results)]
    for file, text in (
        ("glue.json", json.dumps(results, indent=1)),
        ("glue.md", "\n".join(lines)),
    ):
        write(path / file, text, path)
    print(json.dumps(results) if args.json else "\n".join(lines))
    ends = [
        f"{TROUBLES[what]}, as said above: {', '.join(troubles[what])}"
        for what in ("failed", "not_handed_in")
        if troubles[what]
    ]
    if ends:
        raise UserError("; ".join(ends))
    return 0


def write(out: Path, text: str, path: Path) -> None:
    """Write a file of the workdir, whole or not at all. Raises UserError."""
    atomic.write_file(out, f"{text}\n", f"--workdir={path}: {out}")


def find(task: Task, folder: Path | None) -> dict[str, Path]:
    """Return a task's files: {name of the validation set, "" of training: file}.

    Raises UserError where there are none. Without a folder they are TensorFlow
    Datasets', {}.
    """
    if folder is None:
        from bertjax.data.corpus.tfds_source import open_split

        open_split(task.train, {task.label: "task.label"})
        return {}
    files = {"": "train.tsv", **task.files.valid}
    own = folder / task.files.folder
    return {name: table_file(own, file) for name, file in files.items()}


def arguments(task: Task, there: Mapping[str, Path], copies: Path) -> list[str]:
    """Return the arguments that name a task's text, as `find` found it.

    copies: the folder of those that `even` makes. Raises UserError.
    """
    if not there:
        return []
    named = task.files
    valid = {k: even(file, copies / named.folder) for k, file in there.items()}
    train = valid.pop("")
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


def even(file: Path, copies: Path) -> Path:
    """Return a table whose rows have as many cells as its first: the file, or a copy.

    The copy, in the folder `copies`, lacks the others, of which QQP's files have some:
    fairseq's preprocess_GLUE_tasks.sh leaves them out too. Says how many.
    """
    lines = read_text(str(file)).split("\n")
    kept = [line for line in lines if line.count("\t") == lines[0].count("\t")]
    lost = sum(map(bool, map(str.strip, lines))) - len(kept)
    if lost <= 0 or len(kept) < 2:
        return file
    cli.say(f"{file}: {counted(lost, 'row')} with more or fewer cells, left out")
    out = copies / file.name.removesuffix(".gz")
    atomic.write_file(out, "\n".join(kept) + "\n", f"{out}")
    return out


def task_keys(named: Files, columns: Sequence[str]) -> dict[str, str]:
    """Return the keys of config.task in which files differ from the task's own."""
    keys = dict(zip(("task.text", "task.text_pair"), columns, strict=False))
    keys |= {"task.label": named.label, "task.labels": ",".join(named.labels)}
    return {key: value for key, value in keys.items() if value}


def table(name: str, task: Task, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for every validation set and metric of a task.

    Of the rates the one whose median of the first metric is highest, on the set that
    chose the run that is kept.
    """
    of = found["best"]["valid"], task.metrics[0]
    first = [r for r in found["spread"] if (r["valid"], r["metric"]) == of]
    known = [row for row in first if row["median"] is not None]  # others are lost
    rate = max(known, key=lambda row: row["median"])["lr"]
    return [
        {"task": name, **row}
        for row in found["spread"]
        if row["lr"] == rate and row["metric"] in task.metrics
    ]


def average(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean over tasks of the mean of a task's medians, WNLI left out."""
    tasks: dict[str, list[float]] = {}
    for row in rows:
        if row["task"] not in LEFT_OUT and row["median"] is not None:
            tasks.setdefault(row["task"], []).append(row["median"])
    means = [statistics.fmean(values) for values in tasks.values()]
    return statistics.fmean(means) if means else None


def markdown(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| task | set | metric | lr | n | median | std | min | max |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in results["tasks"]:
        told = [
            "-" if row[key] is None else f"{100 * row[key]:.2f}"
            for key in ("median", "std", "min", "max")
        ]
        if row["n"] == 1:
            told[1] = "one seed"
        yield (
            f"| {row['task']} | {row['valid']} | {row['metric']} | {row['lr']:g} | "
            f"{row['n']} | {' | '.join(told)} |"
        )
    names = {r["task"] for r in results["tasks"]} - {*LEFT_OUT}
    if results["average"] is not None:
        yield ""
        yield f"Mean of {len(names)} tasks' medians: {100 * results['average']:.2f}"
    for what, told in TROUBLES.items():
        for name, why in results[what].items():
            yield f"{told.capitalize()}: {name} ({why})"


def hand_in(task: Task, folder: Path | None, path: Path, model: Path) -> None:
    """Write the best run's answers to a task's tests, where there are some.

    folder: the task's own of the benchmark's files; None: its text is TFDS's, whose
    rows are in another order. Raises UserError.
    """
    named = task.files
    columns = (named.test_columns or named.columns) if folder else ()
    columns = columns or task.columns
    opened = open_finetuned(str(model))
    opened = opened._replace(form=opened.form._replace(columns=columns))
    keys = dict(zip(("task.text", "task.text_pair"), columns, strict=False))
    keys |= {} if folder else {"--data": "idx"}
    for name, source in tests(task, folder).items():
        out = path / "submission" / named.submit[name]
        try:
            rows = read_rows(source, "--data", keys, cli.say)
        except UserError as e:
            if folder:
                raise
            cli.say(f"no {out.name}: {e}")
            continue
        said = {}
        for i, one in zip(numbers(rows), answer(opened, rows), strict=True):
            said[i] = f"{one['value']:.3f}" if "value" in one else one["label"]
            if named.labels and "label" in one:  # the site's names of the classes
                said[i] = named.labels[opened.form.labels.index(said[i])]
        lines = [f"{i}\t{said[i]}" for i in sorted(said)]
        write(out, "\n".join(["index\tprediction", *lines]), path)
        cli.say(f"wrote {out}")


def numbers(rows: Sequence[Row]) -> list[int]:
    """Return which row of the test each is: what its column says, else its place.

    Raises UserError where that is no number, or another row's.
    """
    name = next((n for n in NUMBERS if n in rows[0].cells), None)
    if name is None:
        return [*range(len(rows))]
    found: dict[int, None] = {}
    for row in rows:
        told = str(row.cells[name]).strip()
        if not told.isdecimal() or not told.isascii():
            raise UserError(f"{row.place}: the {name} {told!r} is no number of a row")
        if int(told) in found:
            raise UserError(f"{row.place}: the {name} {told} is there twice")
        found[int(told)] = None
    return [*found]


def tests(task: Task, folder: Path | None) -> dict[str, str]:
    """Return what a task's tests are read from: {name: file that is there, or tfds:}.

    MNLI's model answers the diagnostic rows, AX, too.
    """
    if folder is None:
        valid = named_sources(task.valid, "data.valid")
        found = {k: v.replace("validation", "test") for k, v in valid.items()}
        more = {"ax": AX} if "ax" in task.files.test else {}
        return found | more
    found = {}
    for name, files in task.files.test.items():
        for file in files.split(","):
            with contextlib.suppress(UserError):
                found.setdefault(name, str(table_file(folder, file)))
        if name not in found:
            missing = folder / files.split(",")[0]
            cli.say(f"no {task.files.submit[name]}: {missing} is not there")
    return found


if __name__ == "__main__":
    cli.command(main)
