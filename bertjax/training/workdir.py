# SPDX-License-Identifier: Apache-2.0
"""The files at the top of a workdir: what was asked for, what it ran on."""

import datetime
import importlib.metadata
import json
import platform
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bertjax import __version__

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "tokenizers",
    "sentencepiece",
)


def is_remote(path: Any) -> bool:
    """True for gs:// and the like."""
    return "://" in str(path)


def write_directory(path: Any, write: Callable[[str], None]) -> None:
    """Let `write(local directory)` fill a flat directory that may be remote."""
    if not is_remote(path):
        write(str(path))
        return
    with tempfile.TemporaryDirectory() as local:
        write(local)
        path.mkdir(parents=True, exist_ok=True)
        for file in Path(local).iterdir():
            (path / file.name).write_bytes(file.read_bytes())


def read_directory(path: Any, read: Callable[[str], Any]) -> Any:
    """Return `read(local directory)` of a flat directory that may be remote."""
    if not is_remote(path):
        return read(str(path))
    with tempfile.TemporaryDirectory() as local:
        for file in path.iterdir():
            (Path(local) / file.name).write_bytes(file.read_bytes())
        return read(local)


def write_text(path: Any, text: str) -> None:
    """Write a small file through a temporary one, so that it is never half there.

    Object stores make a file appear whole, and have no cheap rename.
    """
    if is_remote(path):
        path.write_text(text)
        return
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text)
    draft.replace(path)


def read_json(path: Any) -> dict[str, Any]:
    """Return the object in a file; {} where there is no whole one."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def versions() -> dict[str, str]:
    """List the versions that decide a run's numbers."""
    found = {"python": platform.python_version(), "bertjax": __version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Return the commit of the source tree this runs from, if it is one."""
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None if done.returncode == 0 else None


def record_run(path: Any, facts: dict[str, Any]) -> None:
    """Write run.json: these facts, versions, machine; one more line of its history."""
    old = read_json(path)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    start = {"time": now, "host": platform.machine(), "versions": versions()}
    run = {
        **facts,
        "git": git_commit(),
        "starts": [*old.get("starts", []), start],
    }
    write_text(path, json.dumps(run, indent=1, sort_keys=True) + "\n")
