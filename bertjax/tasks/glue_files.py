# SPDX-License-Identifier: Apache-2.0
"""GLUE's text: where its own folders and TensorFlow Datasets have a task's rows."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from bertjax import UserError, counted
from bertjax.data.corpus.sources import named_sources
from bertjax.data.corpus.tfds_source import open_split
from bertjax.storage import atomic
from bertjax.tasks.catalog import Task
from bertjax.tasks.tables import Row, Say, read_text

DIAGNOSTIC = "tfds:glue/ax:test"
NUMBERS = ("index", "id", "idx")  # columns of a test: of the files, QQP's, TFDS's


def train_arguments(
    task: Task, folder: Path | None, copies: Path, say: Say
) -> list[str]:
    """Return the arguments that name a task's training and validation text.

    folder: that of the benchmark's own folders; None: TensorFlow Datasets, which the
    task itself names. copies: for `drop_uneven_rows`. Raises UserError where there is
    no text.
    """
    if folder is None:
        open_split(task.train, {task.label: "task.label"})
        return []
    files = task.files
    train, *valid = (
        drop_uneven_rows(find_table(folder / files.folder / name), copies, say)
        for name in ("train.tsv", *files.valid.values())
    )
    names = [f"{name}=" * (len(valid) > 1) for name in files.valid]
    named = [f"{name}{file}" for name, file in zip(names, valid, strict=True)]
    keys = dict(zip(("task.text", "task.text_pair"), files.columns, strict=False))
    keys |= {"task.label": files.label, "task.labels": ",".join(files.labels)}
    keys |= {"data.train": train, "data.valid": ",".join(named)}
    return [f"--config.{key}={value}" for key, value in keys.items() if value]


def find_table(path: Path) -> Path:
    """Return a file, or the same with .gz. Raises UserError where there is none."""
    for file in (path, path.with_name(f"{path.name}.gz")):
        if file.is_file():
            return file
    raise UserError(f"{path} does not exist")


def drop_uneven_rows(file: Path, copies: Path, say: Say) -> Path:
    """Return a table whose rows have as many cells as its first: the file, or a copy.

    The copy, in a folder of `copies`, lacks the others, of which QQP's files have some:
    fairseq's preprocess_GLUE_tasks.sh leaves them out too. Says how many.
    """
    lines = read_text(str(file)).split("\n")
    even = [line for line in lines if line.count("\t") == lines[0].count("\t")]
    lost = sum(map(bool, map(str.strip, lines))) - len(even)
    if lost <= 0 or len(even) < 2:
        return file
    say(f"{file}: {counted(lost, 'row')} with more or fewer cells, left out")
    out = copies / file.parent.name / file.name.removesuffix(".gz")
    atomic.write_file(out, ("\n".join(even) + "\n").encode(), f"{out}")
    return out


def test_sources(task: Task, folder: Path | None, say: Say) -> dict[str, str]:
    """Return what a task's tests are read from: {name: file, or tfds:}.

    folder: as `train_arguments` has it; says which file does not exist. MNLI's model
    answers the diagnostic rows, AX, too.
    """
    if folder is None:
        valid = named_sources(task.valid, "data.valid")
        found = {k: v.replace("validation", "test") for k, v in valid.items()}
        return found | ({"ax": DIAGNOSTIC} if "ax" in task.files.test else {})
    found = {}
    for name, files in task.files.test.items():
        places = [folder / task.files.folder / file for file in files.split(",")]
        for place in reversed(places):
            with contextlib.suppress(UserError):
                found[name] = str(find_table(place))
        if name not in found:
            say(f"no {task.files.file_to_submit(name)}: {places[0]} does not exist")
    return found


def row_numbers(rows: Sequence[Row]) -> list[int]:
    """Return which row of the test each is: what its column says, else its place.

    Raises UserError where that is no number, or another row's.
    """
    name = next((n for n in NUMBERS if n in rows[0].cells), None)
    if name is None:
        return [*range(len(rows))]
    found: dict[int, None] = {}
    for row in rows:
        cell = str(row.cells[name]).strip()
        if not cell.isdecimal() or not cell.isascii():
            raise UserError(f"{row.place}: the {name} {cell!r} is no number of a row")
        if int(cell) in found:
            raise UserError(f"{row.place}: the {name} {cell} occurs twice")
        found[int(cell)] = None
    return [*found]
