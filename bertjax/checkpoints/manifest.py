# SPDX-License-Identifier: Apache-2.0
"""Listing and verification of checkpoints by checksums, without jax or orbax.

WORKDIR/checkpoints/<step>/state/...      written by orbax
                           meta.json      step, tokens, config, tokenizer, format
                           manifest.json  a checksum per file and its own, written last
WORKDIR/damaged/<step>                    checkpoints that failed their checksums
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

# Since format 2 the frozen parameters (optim.freeze) are in a separate part, `frozen`,
# and not in `params`, `ema` and the optimizer's state.
FORMAT = 2
MANIFEST = "manifest.json"
META = "meta.json"


def as_path(path: str | Path) -> Any:
    """Return an absolute path object, as orbax requires; gs:// through etils.

    Raises UserError for other kinds of URLs, for gs: without //, which would be a local
    directory, and for a URL that cannot be reached.
    """
    if is_remote(path):
        from etils import epath

        try:
            found = epath.Path(path)
            found.exists()
        except Exception as e:  # each kind of storage has its own exceptions
            reason = " ".join(str(e).split())[:200]
            raise UserError(
                f"{path} cannot be reached ({type(e).__name__}: {reason}): give a "
                "directory, or a bucket that you can read, gs://BUCKET/DIRECTORY"
            ) from None
        return found
    if str(path).startswith("gs:"):
        raise UserError(f"{path}: a bucket is written gs://BUCKET/DIRECTORY")
    return expand(path).absolute()


def local_workdir(path: str, flag: str = "--workdir") -> Path:
    """Return a flag's workdir as an absolute path on a disk of this machine.

    Raises UserError for a URL.
    """
    if is_remote(path):
        raise UserError(f"{flag}={path}: give a directory on a disk of this machine")
    return expand(path, flag).absolute()


def steps(workdir: Any) -> list[int]:
    """List the steps of WORKDIR/checkpoints in ascending order."""
    folder = workdir / "checkpoints"
    saved = _numbered(folder)
    if is_remote(folder):  # there it is complete once it has a manifest (manager.py)
        saved = [n for n in saved if (folder / str(n) / MANIFEST).exists()]
    return saved


def unfinished(workdir: Any) -> list[Any]:
    """List what a run that was killed while saving or deleting left in checkpoints/."""
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
    """List the files below a folder by relative name, without the manifest."""
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
    """Return the sha256 of a manifest's content; later formats must keep this one."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _read_manifest(folder: Any) -> dict[str, Any]:
    """Return a manifest's content. Raises ValueError if it is damaged."""
    record = json.loads((folder / MANIFEST).read_text())
    if not isinstance(record, dict):
        raise ValueError
    own = record.pop("checksum", None)
    # The first manifests had no checksum, and exactly these keys. A manifest with a
    # flipped bit does not look like one of them.
    known = record.keys() == {"format", "sha256"} and record["format"] == 1
    first = own is None and known
    if not first and own != _own_checksum(record):
        raise ValueError
    return record


def problem(folder: Any) -> str | None:
    """Return what is wrong with a checkpoint's files; None if they are intact.

    Raises UserError if a later version wrote them, which is no damage.
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
            f"{FORMAT}: it was written by a later bertjax, install that one"
        )
    present = files(folder)
    for name, known in record["sha256"].items():
        if name not in present:
            return f"{name} is missing"
        if checksum(present[name]) != known:
            return f"{name} has another checksum than when it was written"
    return None


def read_meta(folder: Any) -> dict[str, Any]:
    """Return the metadata of a checkpoint."""
    return json.loads((folder / META).read_text())


def newest_before(workdir: Any, step: int) -> int | None:
    """Return the step of the newest intact checkpoint up to `step`, or None."""
    for found in reversed(steps(workdir)):
        if found <= step and not problem(workdir / "checkpoints" / str(found)):
            return found
    return None


def newest_intact(workdir: Any, say: Callable[[str], None]) -> int | None:
    """Verify checkpoints from the newest down; return the first intact step.

    Returns None if there were no checkpoints. A damaged one is reported, moved to
    WORKDIR/damaged and kept. Raises RunError if there were checkpoints and none is
    intact.
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
    # None is intact, now or at an earlier start: starting anew would hide the loss.
    if found or _numbered(workdir / "damaged"):
        raise RunError(
            f"no checkpoint of {workdir} is whole; nothing was started: look at its "
            "damaged/, or take another workdir"
        )
    return None


def resolve(
    model: str | Path, say: Callable[[str], None] = lambda text: None
) -> tuple[Any, Any]:
    """Return (workdir, checkpoint) for the path of a workdir or of a checkpoint.

    For a workdir it is the newest checkpoint, or the best one (eval.best) if the run
    kept that, which is reported if they differ. Raises FileNotFoundError if there is no
    checkpoint.
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
