# SPDX-License-Identifier: Apache-2.0
"""Calibration rows: full sentences of running text, without masks."""

from typing import Any

import numpy as np

from bertjax import UserError, counted
from bertjax.assembly import batches, prepared_text
from bertjax.assembly.models import LoadedModel, row_length
from bertjax.config import cli, schema
from bertjax.data.corpus.sources import parse_sources

TOKENS = 2048  # padded tokens per batch
# Keys taken from the model's config: how texts are read, and where stores are cached.
SAME = ("cache", "text_field", "segmenter", "max_line_bytes", "lower_case")


def read_calibration(
    opened: LoadedModel, text: str, rows: int, length: int | None
) -> list[dict[str, np.ndarray]]:
    """Read `rows` rows of --text as batches for `hessians.Walk`.

    length: tokens per row, including special ones; None: 128, or the model's greatest
    length if that is less. A row is filled with consecutive sentences. The rows are
    spread over the text, and are the same in every call. Reports if the text has fewer
    rows. Raises UserError for invalid texts.
    """
    length = row_length(opened.cfg, length)
    parse_sources(text, "--text", "valid")  # its messages name the flag
    config = schema.base()
    config.data.update({key: opened.config.data[key] for key in SAME})
    config.data.update(valid=text, plan="full_sentences", length=length)
    prepared_text.settle_cache(config, cli.say)

    def say(line: str) -> None:  # a set without a name is called "valid"
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
