# SPDX-License-Identifier: Apache-2.0
"""Vectors of sentences, a line each: a .npy of float32 [lines, hidden_size].

python -m bertjax.embed --model=DIR --text=FILE|- --out=FILE.npy
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bertjax import UserError, counted
from bertjax.assembly import command_line
from bertjax.config import cli
from bertjax.config.flag_help import Flag, shared
from bertjax.data.corpus import files
from bertjax.inference.embed_texts import open_embedder
from bertjax.storage import atomic
from bertjax.tasks import tables

FLAGS = {
    **shared("model"),
    "text": Flag("a sentence a line; - is standard input"),
    "out": Flag("the .npy to write, a row a line"),
    "pooling": Flag("mean, cls or last, unless given what the model was made for"),
    "normalize": Flag("make each vector of length 1", kind=bool),
    "max_length": Flag(
        "tokens of a line, special ones included; longer lines are cut; unless "
        "given what the model was made for",
        kind=int,
        least=3,
    ),
    **shared("batch_size", "dtype", "weights"),
}


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, FLAGS, __doc__, needs_config=False)
    if not args.model or not args.text or not args.out:
        raise UserError("--model, --text and --out are needed: see --help")
    out = atomic.check_out(args.out, "--out", ".npy")
    lines = read_lines(args.text)
    options = args.weights, args.pooling, args.normalize, args.max_length
    model = open_embedder(args.model, "--model", args.dtype, *options)
    vectors, cut = model.embed(lines, args.batch_size)
    write(out, vectors)
    how = model.how
    line = f"{out}: {counted(len(lines), 'row')} of {vectors.shape[1]}, "
    line += f"{how.pooling} pooling" + ", of length 1" * how.normalize
    line += f", each after {how.prompt!r}" * bool(how.prompt)
    line += f"; {counted(cut, 'line')} cut at {how.longest} tokens" * bool(cut)
    empty = sum(not line.strip() for line in lines)
    cli.say(line + f"; {counted(empty, 'empty line')}" * bool(empty))
    return 0


def read_lines(path: str) -> list[str]:
    """Return the lines of a file, or of standard input (-), without their ends.

    A file may be packed (.gz, .zst), or a pipe, which is read until its writer ends.
    UserError names a bad line.
    """
    file = Path(path).expanduser()
    if file.is_socket() or file.is_char_device() or file.is_block_device():
        raise UserError(f"--text={path}: neither a file nor a pipe")
    try:
        if path == "-":
            content = sys.stdin.buffer.read()
        elif file.is_file() and path.lower().endswith((".gz", ".zst")):
            content = b"".join(files.unpacked(str(file)))
        else:
            content = file.read_bytes()
    except OSError as e:
        raise UserError(f"--text={path} cannot be read: {e.strerror}") from e
    lines = tables.decode(content, f"--text={path}").split("\n")
    if not lines[-1]:
        lines.pop()  # what ends with a newline ends there
    if not lines:
        raise UserError(f"--text={path} is empty")
    return [line.removesuffix("\r") for line in lines]


def write(out: Path, vectors: np.ndarray) -> None:
    """Write an array, whole or not at all. Raises UserError."""
    atomic.write_file(out, lambda file: np.save(file, vectors), f"--out={out}")


if __name__ == "__main__":
    cli.command(main)
