# SPDX-License-Identifier: Apache-2.0
"""The embedded corpus `builtin:docs`: English prose that every installation has.

It consists of Python's help topics, the docstrings of its standard library and of the
packages that bertjax depends on, and the descriptions of those packages. Source files
are parsed, never imported. The text is reduced to paragraphs of prose, joined into
documents, split into train and valid with near-duplicates on one side, and written once
to `cache/builtin-docs/`; from then on that copy is used, whatever is installed later.
"""

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bertjax import counted
from bertjax.data.corpus.prose import prose
from bertjax.storage import directories

FORMAT = 1
# Base dependencies and what they depend on; other installed packages are ignored.
PACKAGES = (
    "jax jaxlib flax optax orbax-checkpoint tensorflow-cpu tensorflow keras "
    "tensorflow-datasets numpy scipy sentencepiece ml-collections tokenizers "
    "safetensors tensorboardX tqdm absl-py etils ml-dtypes opt-einsum treescope h5py "
    "huggingface-hub fsspec protobuf pyarrow requests urllib3 rich pygments "
    "setuptools packaging simple-parsing grpcio optree tensorstore wrapt click attrs "
    "psutil gast array-record dm-tree tensorflow-metadata typing-extensions msgpack "
    "humanize immutabledict promise simplejson pyyaml markdown-it-py anyio filelock"
)
VALID_PERCENT = 3
DOCUMENT_LENGTH = 2000  # characters; docstrings of a module are joined up to this
SHINGLE = 5  # words
NEAR = 0.3  # documents with this share of common shingles go to the same side

_SKIPPED = re.compile(
    r"(^|/)(tests?|testing|_vendor|_vendored|vendor|_bundled|site-packages|lib2to3"
    r"|idle_test|pydoc_data|_api|_tf_keras)/|(_pb2(_grpc)?|_test|conftest|/topics)\.py$"
    r"|(^|/)test_[^/]*\.py$"
)


def _distributions() -> Iterator[tuple[str, Any]]:
    for name in PACKAGES.split():
        try:
            yield name, importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # tensorflow or tensorflow-cpu: one of them is installed


def _python_files() -> list[str]:
    """Return the .py files of the standard library and the packages, in fixed order."""
    root = sysconfig.get_paths()["stdlib"]
    files = []
    for folder, folders, names in os.walk(root):
        inside = os.path.relpath(folder, root).replace(os.sep, "/") + "/"
        folders[:] = [] if _SKIPPED.search(inside) else sorted(folders)
        paths = (os.path.join(folder, n) for n in sorted(names) if n.endswith(".py"))
        files += [p for p in paths if not _SKIPPED.search(p[len(root) :])]
    for _, package in _distributions():
        inner = sorted(str(f) for f in package.files or () if f.suffix == ".py")
        files += [str(package.locate_file(f)) for f in inner if not _SKIPPED.search(f)]
    return files


_COMMENTS = re.compile(r"(?:^[ \t]*#(?: .*)?\n){3,}", re.MULTILINE)


_BODIES = ("body", "handlers", "orelse", "finalbody")


def _texts(source: str) -> Iterator[str]:
    """Yield the docstrings and other long strings of a module, then its comments."""
    waiting: list[ast.AST] = []
    with (
        warnings.catch_warnings(),
        contextlib.suppress(SyntaxError, ValueError, RecursionError),
    ):
        warnings.simplefilter("ignore")
        waiting.append(ast.parse(source))
    while waiting:  # visit only statements, because most nodes are expressions
        node = waiting.pop()
        inner = [n for part in _BODIES for n in getattr(node, part, ())]
        waiting.extend(reversed(inner))
        value = getattr(node, "value", None)
        # Besides docstrings: constants, and arguments, as in numpy's add_newdoc.
        args = value.args if isinstance(value, ast.Call) else [value]
        for arg in args:
            if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
                yield arg.value
    for block in _COMMENTS.findall(source):
        yield re.sub(r"(?m)^[ \t]*# ?", "", block)


def _normal(text: str) -> str:
    return " ".join(re.findall(r"[a-z]+", text.lower()))


def _documents(say: Callable[[str], None]) -> list[list[str]]:
    """Join paragraphs into documents; each paragraph is used once."""
    seen: set[bytes] = set()
    documents: list[list[str]] = []

    def add(parts: Iterable[str]) -> None:
        document: list[str] = []
        for part in parts:
            for paragraph in prose(part):
                key = hashlib.sha1(_normal(paragraph).encode()).digest()
                if key not in seen:
                    seen.add(key)
                    document.append(paragraph)
            if sum(map(len, document)) >= DOCUMENT_LENGTH:
                documents.append(document)
                document = []
        if sum(map(len, document)) >= 200:
            documents.append(document)
        elif document and documents:
            documents[-1].extend(document)

    topics = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        add([topics[name]])
    for _, package in _distributions():
        metadata = package.metadata
        add([metadata.get_payload() or metadata.get("Description") or ""])
    files = _python_files()
    for number, file in enumerate(files):
        if number % 1000 == 999:
            say(f"builtin:docs: read {number + 1} of {len(files)} files")
        try:
            source = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        add(_texts(source))
    return documents


def _shingles(documents: list[list[str]]) -> list[list[np.ndarray]]:
    """Hash the word 5-grams of each paragraph: u64 arrays of distinct values."""
    numbers: dict[str, int] = {}

    def hashes(paragraph: str) -> np.ndarray:
        words = _normal(paragraph).split()
        ids = np.array(
            [numbers.setdefault(w, len(numbers) + 1) for w in words], np.uint64
        )
        n = max(len(ids) - SHINGLE + 1, 1)
        value = np.zeros(n, np.uint64)
        for shift in range(min(SHINGLE, len(ids))):
            value = value * np.uint64(0x9E3779B97F4A7C15) + ids[shift : shift + n]
            value ^= value >> np.uint64(29)
        return np.unique(value)

    return [list(map(hashes, document)) for document in documents]


def _clusters(shingles: list[list[np.ndarray]]) -> list[int]:
    """Return for each document the first document of its cluster of near-duplicates.

    Two documents belong together if they share NEAR of the shingles of the smaller one.
    A shingle that occurs in many documents is compared between neighbors only.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    whole = [np.unique(np.concatenate(arrays)) for arrays in shingles]
    sizes = np.array([len(w) for w in whole])
    value = np.concatenate(whole)
    owner = np.repeat(np.arange(len(whole), dtype=np.uint64), sizes)
    order = np.argsort(value, kind="stable")  # owners stay in ascending order
    value, owner = value[order], owner[order]
    pairs = []
    for lag in range(1, 8):
        same = value[lag:] == value[:-lag]
        pairs.append(owner[:-lag][same] << np.uint64(32) | owner[lag:][same])
    pair, common = np.unique(np.concatenate(pairs), return_counts=True)
    first = (pair >> np.uint64(32)).astype(int)
    second = (pair & np.uint64(0xFFFFFFFF)).astype(int)
    near = common >= NEAR * np.minimum(sizes[first], sizes[second])
    edges = coo_array((near[near], (first[near], second[near])), 2 * [len(whole)])
    _, cluster = connected_components(edges, directed=False)
    _, leader = np.unique(cluster, return_index=True)
    return leader[cluster].tolist()


def split(documents: list[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Split documents into train and valid, in an order drawn by their hashes.

    Near-duplicates go to one side together; a paragraph of valid that shares NEAR of
    its shingles with train is dropped.
    """
    shingles = _shingles(documents)
    clusters = _clusters(shingles)
    keys = [hashlib.sha256("\n".join(d).encode()).hexdigest() for d in documents]
    sides = [int(keys[c], 16) % 1000 < 10 * VALID_PERCENT for c in clusters]
    order = sorted(range(len(documents)), key=keys.__getitem__)
    train = [documents[i] for i in order if not sides[i]]
    trained = [a for i in order if not sides[i] for a in shingles[i]]
    known = np.unique(np.concatenate([np.zeros(1, np.uint64), *trained]))

    def is_new(values: np.ndarray) -> bool:
        at = np.minimum(np.searchsorted(known, values), len(known) - 1)
        return (known[at] == values).mean() < NEAR

    valid = []
    for i in order:
        if sides[i]:
            pairs = zip(documents[i], shingles[i], strict=True)
            document = [p for p, a in pairs if is_new(a)]
            if sum(map(len, document)) >= 100:
                valid.append(document)
    return train, valid


def materialize(
    cache_dir: str | os.PathLike[str], say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Create the corpus in `cache_dir`/builtin-docs unless it exists; return its paths.

    The result holds the paths `train` and `valid`, `hash` (of both files' content) and
    `meta` (format version, hashes, sizes, counts, package versions). Raises UserError
    if it cannot be written.
    """
    target = Path(cache_dir) / "builtin-docs"
    meta = _read_meta(target)
    if meta is None:
        directories.remove(target)  # an existing corpus is damaged
        directories.make_whole(target, functools.partial(_write, say=say))
        meta = _read_meta(target)
    sums = "".join(meta["files"][side]["sha256"] for side in ("train", "valid"))
    return {
        "train": str(target / "train.txt"),
        "valid": str(target / "valid.txt"),
        "hash": hashlib.sha256(sums.encode()).hexdigest(),
        "meta": meta,
    }


def _read_meta(target: Path) -> dict[str, Any] | None:
    """Return meta.json if the corpus is complete and of this format, else None."""
    try:
        meta = json.loads((target / "meta.json").read_text())
        same = meta["format"] == FORMAT and all(
            (target / f"{side}.txt").stat().st_size == meta["files"][side]["bytes"]
            for side in ("train", "valid")
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return meta if same else None


def _write(folder: Path, say: Callable[[str], None]) -> None:
    say("builtin:docs: reading the documentation of Python and its packages (once)")
    files = {}
    for side, documents in zip(("train", "valid"), split(_documents(say)), strict=True):
        data = "\n".join("\n".join(d) + "\n" for d in documents).encode()
        (folder / f"{side}.txt").write_bytes(data)
        files[side] = {
            "bytes": len(data),
            "documents": len(documents),
            "paragraphs": sum(map(len, documents)),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    versions = {name: package.version for name, package in _distributions()}
    versions["python"] = ".".join(map(str, sys.version_info[:3]))
    meta = {"format": FORMAT, "files": files, "versions": versions}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1, sort_keys=True))
    number = counted(files["train"]["documents"], "document")
    say(
        f"builtin:docs: {files['train']['bytes'] / 1e6:.1f} MB in {number}, and "
        f"{files['valid']['bytes'] / 1e6:.2f} MB held out"
    )
