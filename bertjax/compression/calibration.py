# SPDX-License-Identifier: Apache-2.0
"""Calibration rows: full sentences of running text, nothing masked."""

from typing import Any

import numpy as np

from bertjax import UserError, counted
from bertjax.assembly import batches, prepared_text
from bertjax.assembly.models import LoadedModel, row_length
from bertjax.config import cli, schema
from bertjax.data.corpus.sources import parse_sources

TOKENS = 2048  # padded tokens at once
# Of the model's config: how its texts are read, and where stores of them are kept.
SAME = ("cache", "text_field", "segmenter", "max_line_bytes", "lower_case")


def read_calibration(
    opened: LoadedModel, text: str, rows: int, length: int | None
) -> list[dict[str, np.ndarray]]:
    """Read `rows` rows of --text as batches for `hessians.Walk`.

    length: tokens of a row, special ones included; None: 128, or what the model has.
    Sentences follow each other until a row is full; the rows are spread over the text,
    the same ones in every call. Says where the text has fewer. Raises UserError.
    """
    length = row_length(opened.cfg, length)
    parse_sources(text, "--text", "valid")  # whose messages name the flag
    config = schema.base()
    config.data.update({key: opened.config.data[key] for key in SAME})
    config.data.update(valid=text, plan="full_sentences", length=length)
    prepared_text.settle_cache(config, cli.say)

    def say(line: str) -> None:  # a set without a name has that of data.valid
        unnamed = line.startswith("valid: ")
        cli.say(f"--text: {line.removeprefix('valid: ')}" if unnamed else line)

    stores = prepared_text.prepare_valid(config, opened.tokenizer, say)
    (name, store), *more = stores.items()
    if more:
        raise UserError(f"--text={text}: calibration reads one set, without a name")
    none: frozenset[str] = frozenset()
    held_out: Any = batches.make_eval_batches(
        config, none, opened.tokenizer, name, store, None, say
    )
    found = len(held_out.eval_ids(rows))
    if found < rows:
        cli.say(f"--text={text} has {counted(found, 'row')} of {length} tokens")
    at_once = max(1, TOKENS // length)
    keys = ("input_ids", "attention_mask", "token_type_ids", "example_weights")
    if not opened.cfg.type_vocab_size:
        keys = tuple(key for key in keys if key != "token_type_ids")
    return [
        {key: batch[key] for key in keys if key in batch}
        for batch in held_out.eval_batches(min(at_once, found), rows)
    ]
