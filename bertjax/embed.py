# SPDX-License-Identifier: Apache-2.0
"""Write one vector per line: a .npy file of float32 [lines, hidden_size].

python -m bertjax.embed --model=DIR --text=FILE|- --out=FILE.npy

A file is embedded block by block, so neither its lines nor their vectors need to fit in
memory; repeat the command to resume. Models with other vectors, which have to fit,
write a .npz: splade a matrix for scipy.sparse.load_npz; colbert `tokens` f32 [T, E] and
`offsets`, where line i has tokens[offsets[i]:offsets[i + 1]].

With --index=DIR instead of --out it writes a directory of passages, from which
bertjax.predict --index answers questions. --text is then BEIR's corpus.jsonl, a table
with a column `text`, or a folder or pattern of text files, which are cut into passages
of --words.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertjax import UserError, counted
from bertjax.assembly import command_line
from bertjax.assembly.resolve import encoder_config
from bertjax.config import cli
from bertjax.config.flag_help import Flag, shared
from bertjax.inference import embed_index
from bertjax.inference.embed_file import embed_file
from bertjax.inference.embed_texts import Embedder, narrow, open_embedder
from bertjax.interop.sentence_transformers import Sentences
from bertjax.parallel.host_memory import keep_freed_memory
from bertjax.storage import atomic, directories
from bertjax.storage.paths import check_writable, expand
from bertjax.tasks import tables
from bertjax.tasks.passage_index import WORDS
from bertjax.tasks.search import MultiVectors, Sparse

FLAGS = {
    **shared("model"),
    "text": Flag("texts, one per line; - is standard input"),
    "out": Flag("the .npy to write, one row per line (.npz for splade and colbert)"),
    "index": Flag("write an index instead: a directory of passages and their vectors"),
    "words": Flag(
        f"with --index: words per passage when text files are split; default: {WORDS}",
        kind=int,
        least=1,
    ),
    "pooling": Flag("mean, cls or last; default: what the model was trained with"),
    "normalize": Flag("scale each vector to length 1", kind=bool),
    "width": Flag(
        "keep only the first WIDTH dimensions of each vector", kind=int, least=1
    ),
    "max_length": Flag(
        "maximum tokens per line, including special tokens; longer lines are "
        "truncated; default: what the model was trained with",
        kind=int,
        least=3,
    ),
    **shared("batch_size", "dtype", "weights"),
}


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, FLAGS, __doc__, needs_config=False)
    keep_freed_memory()
    if not args.model or not args.text or bool(args.out) == bool(args.index):
        either = "--model, --text and either --out or --index"
        raise UserError(f"{either} are needed: see --help")
    if args.index:
        return make_index(args)
    if args.words is not None:
        raise UserError("--words needs --index=DIR, which is not given")
    if tables.is_json(args.text):
        raise UserError(
            f"--text={args.text} is JSON, and lines of plain text are embedded; "
            "--index=DIR in the place of --out takes passages in JSON lines"
        )
    ending = ".npz" if args.out.lower().endswith(".npz") else ".npy"
    out = atomic.check_out(args.out, "--out", ending, ("--text", args.text))
    in_blocks = ending == ".npy" and is_file(args.text)
    lines = [] if in_blocks else tables.read_lines(args.text, "--text")
    options = args.weights, args.pooling, args.normalize, args.max_length
    model = open_embedder(args.model, "--model", args.dtype, *options)
    how = model.how
    if (how.kind == "dense") != (ending == ".npy"):
        wanted = ".npy" if how.kind == "dense" else ".npz"
        raise UserError(
            f"--out={args.out}: vectors of this model are {how.kind}: a {wanted}"
        )
    if args.width and how.kind != "dense":
        raise UserError(f"--width: vectors of this model are {how.kind}")
    numbers = encoder_config(model.config, model.tokenizer.vocab_size).hidden_size
    if args.width and args.width > numbers:
        raise UserError(
            f"--width={args.width}: the model's vectors have {numbers} numbers"
        )
    if in_blocks:
        path = str(expand(args.text, "--text"))
        try:
            todo = model, path, out, args.batch_size, args.width, cli.say
            with directories.lock(out, "--out", "writes it"):
                (rows, width), cut, empty = embed_file(*todo)
        except OSError as e:
            why = f"cannot be written: {e.strerror or e}"
            raise UserError(f"--out={out} {why}") from e
    else:
        cut, width = write_lines(model, lines, out, args)
        rows, empty = len(lines), sum(not line.strip() for line in lines)
    line = f"{out}: {counted(rows, 'row')} of {width}, {describe(how)}"
    line += f"; {counted(cut, 'line')} cut at {how.longest} tokens" * bool(cut)
    cli.say(line + f"; {counted(empty, 'empty line')}" * bool(empty))
    return 0


def make_index(args: Any) -> int:
    """Write --index; its vectors are always made as the model was trained for."""
    for name in ("pooling", "normalize", "width", "max_length"):
        if getattr(args, name) is not None:
            raise UserError(
                f"--{name} has no effect with --index, whose vectors are made as in "
                "the model's training"
            )
    folder, more = expand(args.index, "--index"), (args.dtype, args.weights)
    check_writable(folder, f"--index={args.index}")
    todo = args.model, folder, args.text, args.words, args.batch_size
    with directories.lock(folder, "--index", "writes it"):
        embed_index.make_index(*todo, cli.say, *more)
    return 0


def describe(how: Sentences) -> str:
    """Describe how vectors are computed."""
    if how.kind == "sparse":
        return "weights of the vocabulary"
    if how.kind == "multi_vector":
        return "a vector a token, of length 1"
    line = f"{how.pooling} pooling" + ", of length 1" * how.normalize
    return line + f", each after {how.prompt!r}" * bool(how.prompt)


def write_lines(
    model: Embedder, lines: list[str], out: Path, args: Any
) -> tuple[int, int]:
    """Write the vectors of lines; return (lines that were cut, a vector's width)."""
    if model.how.kind == "dense":
        vectors, cut = model.embed(lines, args.batch_size)
        vectors = narrow(vectors, args.width, model.how.normalize)
        write(out, vectors)
        return cut, vectors.shape[1]
    index, cut = model.make_index(lines, args.batch_size)
    save: Any
    if isinstance(index, Sparse):
        from scipy.sparse import save_npz

        save, width = functools.partial(save_npz, matrix=index.weights), index.width
    else:
        assert isinstance(index, MultiVectors)
        arrays = {"tokens": index.tokens, "offsets": index.offsets}
        save, width = functools.partial(np.savez, **arrays), index.tokens.shape[1]
    atomic.write_file(out, save, f"--out={out}")
    return cut, width


def is_file(path: str) -> bool:
    """Return whether a path is a file on disk, which can be read twice."""
    return path != "-" and expand(path, "--text").is_file()


def write(out: Path, vectors: np.ndarray) -> None:
    """Write an array, whole or not at all. Raises UserError."""
    atomic.write_file(out, lambda file: np.save(file, vectors), f"--out={out}")


if __name__ == "__main__":
    cli.command(main)
