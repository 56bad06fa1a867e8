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
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from bertjax import UserError, disk
from bertjax import config as c
from bertjax.fill_mask import bucket_lengths
from bertjax.tasks import prepare as tasks
from bertjax.tasks import tables
from bertjax.tasks.texts import Form, Texts, make_texts


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
    model = open_finetuned(args.model, args.dtype, args.weights)
    rows = read_input(args.input, model.form.keys(labelled=False))
    write(out, answer(model, rows, args.batch_size))
    return 0


class Finetuned(NamedTuple):
    """A model that answers: what its rows look like, and its parameters."""

    config: Any
    objective: str
    form: Form
    tokenizer: Any
    params: Any


def open_finetuned(
    path: str, dtype: str = "float32", weights: str = "", flag: str = "--model"
) -> Finetuned:
    """Open a finetuned model. Raises UserError for one that was not finetuned."""
    config, tokenizer, checkpoint, meta = disk.open_model(path, flag)
    if "task" not in meta:
        raise UserError(
            f"{flag}={path} was not finetuned: fill_mask and embed use such models"
        )
    config.dtype = dtype
    labels = tuple(meta["task"]["labels"])
    form = tasks.make_form(config)._replace(labels=labels)
    objective = config.objective + f":classes={len(labels)}" * bool(labels)
    params = disk.read_params(checkpoint, config.objective, weights)
    return Finetuned(config, objective, form, tokenizer, params)


def answer(
    model: Finetuned, rows: Sequence[tables.Row], batch_size: int = 32
) -> Iterator[dict[str, Any]]:
    """Yield what a model says of each row, in order."""
    texts = make_texts(rows, model.form, model.tokenizer, labelled=False, say=c.say)
    return answers(predict(model, texts, batch_size), model.form.labels)


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


def predict(model: Finetuned, texts: Texts, batch_size: int) -> np.ndarray:
    """Return the scores of all rows, in order: f32 [n, C], or [n].

    Rows go by falling length through at most five shapes.
    """
    import jax

    from bertjax.data.progress import Progress
    from bertjax.objectives.base import make_objective

    tokenizer = model.tokenizer
    cfg = c.encoder_config(model.config, tokenizer.vocab_size)
    made, cfg = make_objective(model.objective, cfg)
    held = jax.device_put(model.params)
    longest = min(model.config.data.length, cfg.max_length)
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
