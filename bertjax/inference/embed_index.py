# SPDX-License-Identifier: Apache-2.0
"""An index made of a collection (tasks/passage_index.py), and passages found in it."""

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

LINES = ".lines.txt"  # what is embedded, until it is


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
    """Make the index `folder` of the texts that --text names, by the model of a path.

    The same command goes on where it stopped. Raises UserError, and where the index is
    made already.
    """
    if (folder / passage_index.FACTS).exists():
        raise UserError(f"--index={folder} is an index already: name another directory")
    begun = (folder / LINES).exists()
    if folder.is_dir() and any(folder.iterdir()) and not begun:
        raise UserError(
            f"--index={folder} has files and is no index: name another directory"
        )
    model = open_retriever(path, "--model", dtype, weights).of_passages()
    passages = passage_index.read_passages(text, "--text", words, say)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lines = folder / LINES  # first: it says that an index is begun
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
    """Open a model whose vectors compare texts by their inner products. Raises
    UserError for one of other vectors."""
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
        from bertjax.models.pooling import normalize_vectors  # which needs jax

        return normalize_vectors(encode(batch))

    return run


def find(
    model: Embedder,
    index: PassageIndex,
    questions: Sequence[str],
    k: int,
    batch_size: int = 32,
) -> list[list[dict[str, Any]]]:
    """Return the k passages of each question that are nearest, best first: id, title,
    text and score. model: of `open_retriever`."""
    return index.found(model.embed([*questions], batch_size)[0], k)
