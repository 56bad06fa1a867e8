# SPDX-License-Identifier: Apache-2.0
"""Find GLUE's rows, in the benchmark's own folders or in TensorFlow Datasets."""

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
# Columns with a test row's number: in the files, in QQP's file, in TFDS.
NUMBERS = ("index", "id", "idx")


def train_arguments(
    task: Task, folder: Path | None, copies: Path, say: Say
) -> list[str]:
    """Return the command-line arguments that name a task's training and validation
    files.

    folder: contains the benchmark's own folders; None: TensorFlow Datasets, which the
    task names itself. copies: see `drop_uneven_rows`. Raises UserError for missing
    files.
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
    """Return the path, or the path with .gz. Raises UserError if neither exists."""
    for file in (path, path.with_name(f"{path.name}.gz")):
        if file.is_file():
            return file
    raise UserError(f"{path} does not exist")


def drop_uneven_rows(file: Path, copies: Path, say: Say) -> Path:
    """Return a table in which every row has as many cells as the first.

    If all rows have, this is the file itself; otherwise it is a copy, in a folder of
    `copies`, without the other rows, whose number is reported. QQP's files have such
    rows, and fairseq's preprocess_GLUE_tasks.sh leaves them out too.
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
    """Return the sources of a task's tests: {name: file or tfds:...}.

    folder: as in `train_arguments`; missing files are reported. MNLI's tests include
    the diagnostic rows, AX.
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
    """Return the number of each row in the test: from a column, otherwise its position.

    Raises UserError if the column holds something else than a number, or a number
    twice.
    """
    name = next((n for n in NUMBERS if n in rows[0].cells), None)
    if name is None:
        return [*range(len(rows))]
    found: dict[int, None] = {}
    for row in rows:
        cell = str(row.cells[name]).strip()
        if not cell.isdecimal() or not cell.isascii():
            raise UserError(
                f"{row.place}: the {name} {cell!r} is not the number of a row"
            )
        if int(cell) in found:
            raise UserError(f"{row.place}: the {name} {cell} occurs twice")
        found[int(cell)] = None
    return [*found]
