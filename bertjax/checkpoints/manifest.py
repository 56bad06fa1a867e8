# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints exist, which are whole: checksums, without jax or orbax.

WORKDIR/checkpoints/<step>/state/...      orbax
                           meta.json      step, tokens, config, tokenizer, format
                           manifest.json  a checksum a file and its own, written last
WORKDIR/damaged/<step>                    what failed its checksums
"""

import hashlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bertjax import RunError, UserError
from bertjax.checkpoints import best
from bertjax.storage.atomic import is_remote
from bertjax.storage.paths import expand

# 2: what is frozen of the model (optim.freeze) is a part of its own, `frozen`, and not
# in `params`, `ema` and the optimizer's.
FORMAT = 2
MANIFEST = "manifest.json"
META = "meta.json"


def as_path(path: str | Path) -> Any:
    """Return an absolute path object (orbax wants one); gs:// through etils.

    Raises UserError for other kinds of URLs, for gs: without its //, which would be a
    directory here, and where one cannot be reached.
    """
    if is_remote(path):
        from etils import epath

        try:
            found = epath.Path(path)
            found.exists()
        except Exception as e:  # each kind of storage has its own
            reason = " ".join(str(e).split())[:200]
            raise UserError(
                f"{path} cannot be reached ({type(e).__name__}: {reason}): give a "
                "directory, or a bucket that you can read, gs://BUCKET/DIRECTORY"
            ) from None
        return found
    if str(path).startswith("gs:"):
        raise UserError(f"{path}: a bucket is written gs://BUCKET/DIRECTORY")
    return expand(path).absolute()


def local_workdir(path: str) -> Path:
    """Return --workdir as an absolute path on a disk of this machine.

    Raises UserError of a URL.
    """
    if is_remote(path):
        raise UserError(f"--workdir={path}: give a directory on a disk of this machine")
    return expand(path, "--workdir").absolute()


def steps(workdir: Any) -> list[int]:
    """List the steps of WORKDIR/checkpoints in ascending order."""
    folder = workdir / "checkpoints"
    saved = _numbered(folder)
    if is_remote(folder):  # the manifest is what makes it one (manager.py)
        saved = [n for n in saved if (folder / str(n) / MANIFEST).exists()]
    return saved


def unfinished(workdir: Any) -> list[Any]:
    """List what kills left in WORKDIR/checkpoints in saving or deleting."""
    folder = workdir / "checkpoints"
    found = [p for p in folder.iterdir() if p.name.startswith(("saving-", "deleting-"))]
    bare = {*_numbered(folder)} - {*steps(workdir)}
    return found + [folder / str(n) for n in sorted(bare)]


def _numbered(folder: Any) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(
        int(p.name)
        for p in folder.iterdir()
        if re.fullmatch("0|[1-9][0-9]*", p.name) and p.is_dir()
    )


def checksum(path: Any) -> str:
    """Return the sha256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def files(folder: Any) -> dict[str, Any]:
    """List the files below a folder by their relative names, the manifest aside."""
    found, todo = {}, [(folder, "")]
    while todo:
        where, prefix = todo.pop()
        for p in where.iterdir():
            if p.is_dir():
                todo.append((p, f"{prefix}{p.name}/"))
            elif prefix or p.name != MANIFEST:
                found[prefix + p.name] = p
    return dict(sorted(found.items()))


def write_manifest(folder: Any) -> None:
    """Write the checksum of every file of a checkpoint."""
    sums = {name: checksum(p) for name, p in files(folder).items()}
    record = {"format": FORMAT, "sha256": sums}
    text = json.dumps({**record, "checksum": _own_checksum(record)}, indent=1)
    (folder / MANIFEST).write_text(text)


def _own_checksum(record: dict[str, Any]) -> str:
    """Return the sha256 of what a manifest says; the same in formats to come."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _read_manifest(folder: Any) -> dict[str, Any]:
    """Return what a manifest says. Raises ValueError where it is damaged."""
    record = json.loads((folder / MANIFEST).read_text())
    if not isinstance(record, dict):
        raise ValueError
    own = record.pop("checksum", None)
    # The first ones had none, and nothing but this; a flipped bit looks otherwise.
    known = record.keys() == {"format", "sha256"} and record["format"] == 1
    first = own is None and known
    if not first and own != _own_checksum(record):
        raise ValueError
    return record


def problem(folder: Any) -> str | None:
    """Say what is wrong with a checkpoint's files; None when they are whole.

    Raises UserError when a later version wrote them: that is no damage.
    """
    try:
        record = _read_manifest(folder)
    except FileNotFoundError:
        return "its manifest is missing"
    except ValueError:
        return "its manifest cannot be read"
    if record["format"] > FORMAT:
        raise UserError(
            f"{folder} has format {record['format']}, this version reads up to "
            f"{FORMAT}: a later bertjax wrote it, install that"
        )
    sums = dict(record["sha256"])
    present = files(folder)
    for name, known in sums.items():
        if name not in present:
            return f"{name} is missing"
        if checksum(present[name]) != known:
            return f"{name} has another checksum than when it was written"
    return None


def read_meta(folder: Any) -> dict[str, Any]:
    """Return what a checkpoint says of itself."""
    return json.loads((folder / META).read_text())


def newest_before(workdir: Any, step: int) -> int | None:
    """Return the newest whole checkpoint of at most this step, if there is one."""
    for found in reversed(steps(workdir)):
        if found <= step and not problem(workdir / "checkpoints" / str(found)):
            return found
    return None


def newest_intact(workdir: Any, say: Callable[[str], None]) -> int | None:
    """Verify from the newest down and return the first whole step; None if none were.

    A damaged one is named, moved to WORKDIR/damaged and kept. Raises
    RunError when there were checkpoints and none is whole.
    """
    found = steps(workdir)
    for step in reversed(found):
        folder = workdir / "checkpoints" / str(step)
        wrong = problem(folder)
        if wrong is None:
            return step
        aside = workdir / "damaged" / str(step)
        aside.parent.mkdir(parents=True, exist_ok=True)
        if aside.exists():
            aside = aside.parent / f"{step}-{time.time_ns()}"
        folder.rename(aside)
        say(f"checkpoints/{step} is damaged: {wrong}; it is now {aside}")
    # Nothing was whole, now or at an earlier start: beginning anew would hide the loss.
    if found or _numbered(workdir / "damaged"):
        raise RunError(
            f"no checkpoint of {workdir} is whole; nothing was started: look at its "
            "damaged/, or take another workdir"
        )
    return None


def resolve(
    model: str | Path, say: Callable[[str], None] = lambda text: None
) -> tuple[Any, Any]:
    """Find (workdir, checkpoint) of a workdir or of a checkpoint.

    A workdir's is its newest, or the best one (eval.best) where its run kept that,
    which is said where they differ. Raises FileNotFoundError.
    """
    path = as_path(model)
    if (path / META).exists():
        return path.parent.parent, path
    found = steps(path)
    if not found:
        raise FileNotFoundError(f"{path} holds no checkpoint")
    step = found[-1]
    if kept := best.best_saved(path, found):
        step = kept.step
        if step != found[-1]:
            say(f"{path}: {kept}, and is taken; the newest checkpoint is {found[-1]}")
    return path, path / "checkpoints" / str(step)
