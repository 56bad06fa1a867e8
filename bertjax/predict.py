# SPDX-License-Identifier: Apache-2.0
"""Answers of a finetuned model: python -m bertjax.predict --model=DIR --input=FILE|-

    [--out=FILE|-] [--batch_size=32] [--dtype=float32] [--weights=raw|ema]

The input is a table with the columns the model was finetuned on, the label aside: TSV,
CSV or JSON lines; on standard input TSV, or JSON lines where it begins with a brace.
Comes out a JSON object a row, in order: label and score (its probability), or value.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from bertjax import UserError, disk
from bertjax import config as c
from bertjax.fill_mask import bucket_lengths
from bertjax.tasks import prepare as tasks
from bertjax.tasks import tables
from bertjax.tasks.texts import Texts, make_texts


def define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string("model", None, "", flag_values=values)
    flags.DEFINE_string("input", None, "", flag_values=values)
    flags.DEFINE_string("out", "-", "", flag_values=values)
    flags.DEFINE_integer("batch_size", 32, "", lower_bound=1, flag_values=values)
    flags.DEFINE_string("dtype", "float32", "", flag_values=values)
    flags.DEFINE_string("weights", "", "", flag_values=values)


def main(argv: Sequence[str]) -> int:
    args = c.parse(argv, define_flags, needs_config=False)
    if not args.model or not args.input:
        raise UserError("--model and --input are needed: see --help")
    out = check_out(args.out)
    config, tokenizer, checkpoint, meta = disk.open_model(args.model, "--model")
    if "task" not in meta:
        raise UserError(
            f"--model={args.model} was not finetuned: fill_mask and embed use it"
        )
    config.dtype = args.dtype
    labels = tuple(meta["task"]["labels"])
    form = tasks.make_form(config)._replace(labels=labels)
    rows = read_input(args.input, form.keys(labelled=False))
    texts = make_texts(rows, form, tokenizer, labelled=False, say=c.say)
    params = disk.read_params(checkpoint, config.objective, args.weights)
    name = f"{config.objective}:classes={len(labels)}" if labels else config.objective
    longest = min(config.data.length, c.encoder_config(config, 1).max_length)
    scores = predict(config, name, params, tokenizer, texts, args.batch_size, longest)
    write(out, answers(scores, labels))
    return 0


def check_out(name: str) -> Path | None:
    """Return the file to write, None for standard output. Raises UserError."""
    if name == "-":
        return None
    out = Path(name).expanduser()
    if out.is_dir() or not out.parent.is_dir():
        raise UserError(f"--out={name} is no file that could be written")
    return out


def read_input(name: str, columns: dict[str, str]) -> list[tables.Row]:
    """Read the rows of a file, or of standard input. Raises UserError."""
    if name != "-":
        return tables.read_rows(name, "--input", columns)
    text = tables.decode(sys.stdin.buffer.read(), "standard input")
    kind = "json" if text.lstrip()[:1] == "{" else "tsv"
    rows = list(tables.parse_rows(text, kind, "standard input", columns))
    if not rows:
        raise UserError("--input=-: there are no rows")
    return rows


def predict(
    config: Any,
    objective: str,
    params: Any,
    tokenizer: Any,
    texts: Texts,
    batch_size: int,
    longest: int,
) -> np.ndarray:
    """Return the scores of all rows, in order: f32 [n, C], or [n].

    Rows go by falling length through at most five shapes.
    """
    import jax

    from bertjax.data.progress import Progress
    from bertjax.objectives.base import make_objective

    cfg = c.encoder_config(config, tokenizer.vocab_size)
    made, cfg = make_objective(objective, cfg)
    held = jax.device_put(params)
    # Sums are of labels, which there are none of: nothing computes them.
    run = jax.jit(lambda params, batch: made.evaluate(params, batch)[1]["scores"])
    sizes = texts.plan(longest).lengths()
    lengths = bucket_lengths(min(-(-int(sizes.max()) // 16) * 16, longest))
    order = np.argsort(-sizes, kind="stable")
    batch_size = min(batch_size, len(order))
    out = None
    with Progress("predict", total=texts.n, unit="rows") as progress:
        for begin in range(0, texts.n, batch_size):
            which = order[begin : begin + batch_size]
            length = next(n for n in lengths if n >= sizes[which[0]])
            filled = np.concatenate([which, np.repeat(which[-1:], batch_size)])
            rows = texts.plan(length).gather(filled[:batch_size], None, tokenizer)
            rows["labels"] = np.zeros(batch_size, np.int32)
            found = np.asarray(run(held, rows))[: len(which)]
            if out is None:
                out = np.empty((texts.n, *found.shape[1:]), np.float32)
            out[which] = found
            progress.add(len(which))
    return out


def answers(scores: np.ndarray, labels: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what is said of each row."""
    if not labels:
        for value in scores:
            yield {"value": float(value)}
        return
    odds = np.exp(scores - scores.max(axis=-1, keepdims=True))
    odds /= odds.sum(axis=-1, keepdims=True)
    for row in odds:
        best = int(row.argmax())
        yield {"label": labels[best], "score": float(row[best])}


def write(out: Path | None, found: Iterator[dict[str, Any]]) -> None:
    """Write JSON lines beside their place and rename them. Raises UserError."""
    lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in found)
    if out is None:
        sys.stdout.write(lines)
        return
    draft = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        draft.write_text(lines, "utf-8")
        draft.replace(out)
    except OSError as e:
        raise UserError(f"--out={out} cannot be written: {e}") from e
    finally:
        draft.unlink(missing_ok=True)


if __name__ == "__main__":
    c.command(main)
