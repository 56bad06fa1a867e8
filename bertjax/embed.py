# SPDX-License-Identifier: Apache-2.0
"""Vectors of sentences, a line each: a .npy of float32 [lines, hidden_size].

python -m bertjax.embed --model=DIR --text=FILE|- --out=FILE.npy
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from bertjax import UserError, counted, registry
from bertjax.assembly import command_line, models, resolve
from bertjax.config import cli
from bertjax.data.corpus import files
from bertjax.fill_mask import count_work, falling_batches
from bertjax.interop import sentence_transformers
from bertjax.storage import atomic
from bertjax.tasks.task_type import POOLINGS

BLOCK = 1000  # lines that are tokenized at a time


def define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string("model", None, "", flag_values=values)
    flags.DEFINE_string(
        "text", None, "a sentence a line; - is standard input", flag_values=values
    )
    flags.DEFINE_string(
        "out", None, "the .npy to write, a row a line", flag_values=values
    )
    flags.DEFINE_string(
        "pooling",
        None,
        "mean or cls, unless given what the model was made for",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "normalize", None, "make each vector of length 1", flag_values=values
    )
    flags.DEFINE_integer(
        "max_length",
        None,
        "tokens of a line, special ones included; longer lines are cut; unless given "
        "what the model was made for",
        lower_bound=3,
        flag_values=values,
    )
    flags.DEFINE_integer("batch_size", 32, "", lower_bound=1, flag_values=values)
    flags.DEFINE_string("dtype", "float32", "", flag_values=values)
    flags.DEFINE_string("weights", "", "", flag_values=values)


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, define_flags, needs_config=False)
    if not args.model or not args.text or not args.out:
        raise UserError("--model, --text and --out are needed: see --help")
    out = atomic.check_out(args.out, "--out", ".npy")
    lines = read_lines(args.text)
    model = open_embedder(
        args.model,
        "--model",
        args.dtype,
        args.weights,
        args.pooling,
        args.normalize,
        args.max_length,
    )
    vectors, cut = model.embed(lines, args.batch_size)
    write(out, vectors)
    how = model.how
    told = f"{out}: {counted(len(lines), 'row')} of {vectors.shape[1]}, "
    told += f"{how.pooling} pooling"
    told += ", of length 1" * how.normalize
    told += f", each after {how.prompt!r}" * bool(how.prompt)
    told += f"; {counted(cut, 'line')} cut at {how.longest} tokens" if cut else ""
    empty = sum(not line.strip() for line in lines)
    cli.say(told + (f"; {counted(empty, 'empty line')}" if empty else ""))
    return 0


class Embedder(NamedTuple):
    """A model that makes vectors; how: as `sentences` says, with nothing left open."""

    encode: Callable[[np.ndarray, np.ndarray], Any]
    tokenizer: Any
    how: sentence_transformers.Sentences
    config: Any
    meta: dict[str, Any]

    def embed(self, lines: list[str], batch_size: int = 32) -> tuple[np.ndarray, int]:
        """Return the vectors of texts, f32 [n, D], and how many texts were cut."""
        longest = self.how.longest
        asked = [self.how.prompt + line for line in lines]
        rows, cut = tokenize(self.tokenizer, asked, longest)
        sizes = np.array([len(row) for row in rows])
        work = count_work(falling_batches(sizes, batch_size, longest)[1])
        parts = batches(rows, self.tokenizer.pad_id, batch_size, longest)
        return embed(self.encode, parts, len(rows), work), cut


def open_embedder(
    path: str,
    flag: str,
    dtype: str = "float32",
    weights: str = "",
    pooling: str | None = None,
    normalize: bool | None = None,
    max_length: int | None = None,
) -> Embedder:
    """Open a model for its vectors; None: as it was made for. Raises UserError."""
    config, tokenizer, checkpoint, meta = models.open_model(path, flag)
    config.dtype = dtype
    cfg = resolve.encoder_config(config, tokenizer.vocab_size)
    made_for = sentence_transformers.sentence_options(checkpoint, meta)
    if pooling is None and made_for.pooling not in POOLINGS:
        raise UserError(
            f"{flag}={path}: its vectors are made by {made_for.pooling}, which "
            "is not known here; --pooling=mean and --pooling=cls give others"
        )
    if made_for.lower and not tokenizer.lower_case:
        raise UserError(
            f"{flag}={path}: {sentence_transformers.LIMITS} has do_lower_case=true, "
            "which is not known here where the tokenizer keeps capitals"
        )
    pooling = made_for.pooling if pooling is None else pooling
    registry.pick("--pooling", pooling, POOLINGS)
    if max_length is not None and max_length > cfg.max_length:
        raise UserError(
            f"--max_length={max_length}: the model has {cfg.max_length} positions"
        )
    longest = min(max_length or made_for.longest or cfg.max_length, cfg.max_length)
    if longest < 2:
        raise UserError(f"{flag}={path}: texts of {longest} tokens are too short")
    how = dataclasses.replace(
        made_for,
        pooling=pooling,
        normalize=made_for.normalize if normalize is None else normalize,
        longest=longest,
    )
    params = models.read_params(checkpoint, weights=weights)
    encode = make_encoder(cfg, params, how.pooling, how.normalize)
    return Embedder(encode, tokenizer, how, config, meta)


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
    found = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not found[-1]:
        found.pop()  # what ends with a newline ends there
    if not found:
        raise UserError(f"--text={path} is empty")
    lines = []
    for number, line in enumerate(found, 1):
        try:
            lines.append(line.removesuffix(b"\r").decode())
        except UnicodeDecodeError as e:
            raise UserError(f"--text={path}: line {number} is not UTF-8") from e
    return lines


def tokenize(
    tokenizer: Any, lines: list[str], longest: int
) -> tuple[list[np.ndarray], int]:
    """Return [CLS] line [SEP] as ids, i32 [length] each, and how many were cut.

    Special pieces in a text are those pieces, as transformers has it.
    """
    marks = [tokenizer.pieces[i] for i in tokenizer.roles.values()]
    rows, cut = [], 0
    for begin in range(0, len(lines), BLOCK):
        block = lines[begin : begin + BLOCK]
        plain = [not any(mark in line for mark in marks) for line in block]
        batch = [line for line, is_plain in zip(block, plain, strict=True) if is_plain]
        encoded = iter(tokenizer.encode_batch(batch))
        for line, is_plain in zip(block, plain, strict=True):
            ids = next(encoded) if is_plain else tokenizer.encode_with_masks(line)
            cut += len(ids) > longest - 2
            ids = [tokenizer.cls_id, *ids[: longest - 2], tokenizer.sep_id]
            rows.append(np.array(ids, np.int32))
    return rows, cut


def make_encoder(
    cfg: Any, params: Any, pooling: str, normalize: bool
) -> Callable[[np.ndarray, np.ndarray], Any]:
    """Make encode(ids, lengths): i32 [B, L], i32 [B] -> vectors, f32 [B, D].

    The mean is over the real tokens, [CLS] and [SEP] included; "cls" is the first
    token's last hidden state, without a pooler (sentence-transformers' Pooling).
    """
    import jax

    from bertjax.models import encoder, stacked_layers

    cfg = encoder.without_pooler(cfg)
    held = jax.device_put(stacked_layers.unstack(params["encoder"], cfg))
    return functools.partial(make_forward(cfg, pooling, normalize), held)


@functools.lru_cache(maxsize=8)
def make_forward(cfg: Any, pooling: str, normalize: bool) -> Callable[..., Any]:
    """Make run(parameters, ids, lengths) -> vectors; the same for the same model."""
    import jax
    import jax.numpy as jnp

    from bertjax.models import encoder
    from bertjax.models.pooling import POOLINGS, normalize_vectors

    pool = POOLINGS[pooling]

    @jax.jit
    def run(held: Any, ids: Any, lengths: Any) -> Any:
        real = (jnp.arange(ids.shape[1]) < lengths[:, None]).astype(jnp.int32)
        batch = {"input_ids": ids, "attention_mask": real}
        hidden = encoder.apply(held, cfg, batch).hidden.astype(jnp.float32)
        vectors = pool(hidden, batch)
        return normalize_vectors(vectors) if normalize else vectors

    return run


def batches(
    rows: list[np.ndarray], pad_id: int, batch_size: int, longest: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield (which rows, ids, lengths) by falling length, at most five shapes.

    longest: what no shape goes beyond. The last batch is filled up with rows of one
    token of padding.
    """
    sizes = np.array([len(row) for row in rows])
    batch_size, planned = falling_batches(sizes, batch_size, longest)
    for which, length in planned:
        ids = np.full((batch_size, length), pad_id, np.int32)
        for row, i in zip(ids, which, strict=False):
            row[: sizes[i]] = rows[i]
        real = np.ones(batch_size, np.int32)
        real[: len(which)] = sizes[which]
        yield which, ids, real


def embed(
    encode: Callable[[np.ndarray, np.ndarray], Any],
    parts: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]],
    count: int,
    work: int | None = None,
) -> np.ndarray:
    """Return the vectors of `count` rows that come in batches, in order: f32 [n, D].

    work: padded tokens of all batches, by which the time left is estimated.
    """
    from bertjax.data.progress import Progress

    vectors, running = None, []
    with Progress("embed", total=count, unit="lines", work=work) as progress:

        def take() -> None:
            nonlocal vectors
            which, length, found = running.pop(0)
            found = np.asarray(found)[: len(which)]
            if vectors is None:
                vectors = np.empty((count, found.shape[1]), np.float32)
            vectors[which] = found
            progress.add(len(which), work=len(which) * length)

        for which, ids, lengths in parts:
            running.append((which, ids.shape[1], encode(ids, lengths)))
            if len(running) > 1:  # one computes while the next is laid out
                take()
        while running:
            take()
    return vectors


def write(out: Path, vectors: np.ndarray) -> None:
    """Write an array, whole or not at all. Raises UserError."""
    atomic.write_file(out, lambda file: np.save(file, vectors), f"--out={out}")


if __name__ == "__main__":
    cli.command(main)
