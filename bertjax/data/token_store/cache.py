# SPDX-License-Identifier: Apache-2.0
"""data.cache: a directory of complete directories, on this machine or behind a URL.

Behind a URL (gs://..., or anything that etils.epath opens), directories are created in
a mirror on the local disk and uploaded as a whole; the file that marks them as complete
comes last. Directories found there are copied to the mirror, checked, and then used
from the mirror.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bertjax import UserError
from bertjax.data.corpus.files import (
    HASHES,
    keeping_hashes,
    load_hashes,
    os_errors,
    save_hashes,
)
from bertjax.storage import directories
from bertjax.storage.atomic import write_file
from bertjax.storage.paths import expand

LAST = ("meta.json", "identity")  # either marks a remote directory as complete
SAME = ".uploaded"  # marks a directory of the mirror that the remote cache has too
MIRRORS = "BERTJAX_LOCAL_CACHE"  # the environment variable


class Cache:
    """Named directories that are either complete or absent; it can be pickled.

    Attributes:
      root: the directory on this machine that holds them.
      url: "", or the URL that the mirror `root` belongs to.
    """

    def __init__(self, root: Path, url: str = "") -> None:
        self.root = root
        self.url = url

    def _far(self, name: str) -> Any:
        from etils import epath

        return epath.Path(self.url) / name

    @contextlib.contextmanager
    def _reaching(self) -> Any:
        try:
            with os_errors():
                yield
        except OSError as err:
            raise UserError(f"data.cache={self.url}: {err.strerror or err}") from None

    def has(self, name: str) -> bool:
        """Return whether a directory exists."""
        if not self.url or (self.root / name / SAME).exists():
            return (self.root / name).is_dir()
        with self._reaching():
            return any((self._far(name) / last).exists() for last in LAST)

    def make(self, name: str, write: Callable[[Path], None], keep: bool = True) -> None:
        """Create a directory that `write` fills; see directories.make_whole.

        Behind a URL, without `keep`, only the uploaded directory stays.
        """
        path = self.root / name
        if not path.is_dir():
            directories.make_whole(path, write, f"data.cache={self.root}")
        if not self.url:
            return
        files = [p for p in path.rglob("*") if p.is_file() and p.name != SAME]
        # The file that marks the directory as complete comes last.
        files.sort(key=lambda p: (p.parent == path and p.name in LAST, str(p)))
        with self._reaching():
            for file in files:
                to = self._far(name) / file.relative_to(path).as_posix()
                to.parent.mkdir(parents=True, exist_ok=True)
                with open(file, "rb") as source, to.open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 22)
            (path / SAME).touch()
        if not keep:
            directories.remove(path)

    def get(self, name: str, check: Callable[[Path], Any] = lambda path: None) -> Path:
        """Return the place of a directory on this machine.

        `check` raises UserError if the copy of a remote directory is damaged.
        """
        path = self.root / name

        def copy(to: Path) -> None:
            with self._reaching():
                _download(self._far(name), to)
            (to / SAME).touch()
            try:
                check(to)
            except UserError:
                raise UserError(
                    f"{self.where(name)}: damaged, a file is not what was written; "
                    "delete the directory and it will be made again"
                ) from None

        if self.url and not path.is_dir():
            directories.make_whole(path, copy, f"data.cache={self.root}")
        return path

    def where(self, name: str) -> str:
        """Return the path or URL of a directory, for people."""
        return f"{self.url}/{name}" if self.url else os.fspath(self.root / name)

    def remove(self, name: str) -> None:
        """Remove a directory, on this machine and behind the URL."""
        directories.remove(self.root / name)
        if self.url:
            with self._reaching():
                far = self._far(name)
                if far.exists():
                    far.rmtree()

    @contextlib.contextmanager
    def sharing_hashes(self) -> Iterator[None]:
        """Share the hashes of texts behind URLs with all users of a cache behind one.

        A new machine then finds their stores without reading the texts. If the bucket
        cannot be read or written, texts are only hashed again. With any cache, the
        hashes of many files are read and saved together.
        """
        root, shared = os.fspath(self.root), {}
        if not self.url:
            with keeping_hashes(root):
                yield
            return
        with self._reaching():
            far = self._far(HASHES)
        with contextlib.suppress(OSError), os_errors():
            known = json.loads(far.read_text()).items()
            shared = {k: v for k, v in known if "://" in k}
            save_hashes(root, shared)
        try:
            with keeping_hashes(root):
                yield
        finally:
            own = {k: v for k, v in load_hashes(root).items() if "://" in k}
            if not own.items() <= shared.items():
                with contextlib.suppress(OSError), os_errors():
                    write_file(far, json.dumps({**shared, **own}, indent=1))


def open_cache(cache: str | os.PathLike[str]) -> Cache:
    """Return data.cache; the mirror of a URL is in $BERTJAX_LOCAL_CACHE or ~/.cache.

    Raises UserError if the directory cannot be created or written.
    """
    where, url = os.fspath(cache), ""
    if "://" in where:
        url = where.rstrip("/")
        mirrors = os.environ.get(MIRRORS) or "~/.cache/bertjax/remote"
        where = f"{mirrors}/{hashlib.sha256(url.encode()).hexdigest()[:16]}"
    path = expand(where, "data.cache")
    existing = next(p for p in (path, *path.parents) if p.exists())
    if not existing.is_dir():
        raise UserError(f"data.cache={where}: {existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"data.cache={where}: {existing} cannot be written to")
    return Cache(path, url)


def _download(far: Any, path: Path) -> None:
    for entry in far.iterdir():
        to = path / entry.name
        if entry.is_dir():
            to.mkdir()
            _download(entry, to)
            continue
        with entry.open("rb") as source, open(to, "wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 22)
