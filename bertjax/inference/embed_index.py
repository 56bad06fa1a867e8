# SPDX-License-Identifier: Apache-2.0
"""Building an index of passages (tasks/passage_index.py), and searching it."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bertjax import UserError, counted
from bertjax.inference.embed_file import embed_file
from bertjax.inference.embed_texts import Embedder, open_embedder
from bertjax.tasks import passage_index
from bertjax.tasks.passage_index import PassageIndex

__all__ = ["find", "make_index", "open_retriever"]

LINES = ".lines.txt"  # the lines to embed; removed when the index is finished


def make_index(
    path: str,
    folder: Path,
    text: str,
    words: int | None,
    batch_size: int,
    say: Callable[[str], None],
    dtype: str = "float32",
    weights: str = "",
) -> None:
    """Build the index `folder` of the texts of --text with the model at `path`.

    The same command resumes where it stopped. Raises UserError for invalid input, and
    if the index exists already.
    """
    if (folder / passage_index.FACTS).exists():
        raise UserError(f"--index={folder} is an index already: name another directory")
    begun = (folder / LINES).exists()
    if folder.is_dir() and any(folder.iterdir()) and not begun:
        raise UserError(
            f"--index={folder} has files and is not an index: name another directory"
        )
    model = open_retriever(path, "--model", dtype, weights).of_passages()
    passages = passage_index.read_passages(text, "--text", words, say)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lines = folder / LINES  # written first: it marks an unfinished index
        lines.write_text("".join(p.whole + "\n" for p in passages), "utf-8")
        passage_index.write_passages(folder, passages)
        vectors = folder / passage_index.VECTORS
        (rows, width), cut, empty = embed_file(
            model, str(lines), vectors, batch_size, None, say
        )
        facts = {"passages": rows, "width": width, "model": model.digest}
        how = dataclasses.asdict(model.how)
        passage_index.seal(folder, {**facts, "path": path, "how": how})
        lines.unlink()
    except OSError as e:
        why = f"cannot be written: {e.strerror or e}"
        raise UserError(f"--index={folder} {why}") from e
    line = f"{folder}: {counted(rows, 'passage')}, vectors of {width}"
    line += f"; {cut:,} cut at {model.how.longest} tokens" * bool(cut)
    say(line + f"; {empty:,} empty" * bool(empty))


def open_retriever(
    path: str, flag: str, dtype: str = "float32", weights: str = ""
) -> Embedder:
    """Open a model, and make its vectors comparable by inner products.

    Raises UserError if its vectors are not dense.
    """
    model = open_embedder(path, flag, dtype, weights)
    if model.how.kind != "dense":
        raise UserError(
            f"{flag}={path}: an index has a vector a passage, and vectors of "
            f"this model are {model.how.kind}"
        )
    if model.how.dot:
        return model
    how = dataclasses.replace(model.how, normalize=True)
    return model._replace(encode=_of_length_1(model.encode), how=how)


def _of_length_1(encode: Any) -> Any:
    def run(batch: Any) -> Any:
        from bertjax.models.pooling import normalize_vectors  # this imports jax

        return normalize_vectors(encode(batch))

    return run


def find(
    model: Embedder,
    index: PassageIndex,
    questions: Sequence[str],
    k: int,
    batch_size: int = 32,
) -> list[list[dict[str, Any]]]:
    """Return the k nearest passages for each question, best first.

    A passage has id, title, text and score. model: from `open_retriever`.
    """
    return index.found(model.embed([*questions], batch_size)[0], k)
