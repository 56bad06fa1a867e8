# SPDX-License-Identifier: Apache-2.0
"""Labelled texts, words or spans, read as the flags of bertjax.probe ask for them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from bertjax.config import cli
from bertjax.probing.labelled_spans import Spans, read_words
from bertjax.probing.targets import SCORES, read_spans
from bertjax.tasks import tables
from bertjax.tasks.task_rows import Form, check_label
from bertjax.tasks.text_rows import Texts, make_texts, read_labels
from bertjax.tasks.types import tag

Examples = Texts | Spans
KINDS = {"label": "rows", "tag": "words", "targets": "spans"}  # flag -> its examples
# The text's column, where --text does not name one.
TEXT_COLUMNS = {"tag": tag.TASK_TYPE.columns["text"], "targets": "text"}


def read_examples(
    args: flags.FlagValues, kind: str, separators: int, tokenizer: Any, longest: int
) -> Sequence[Examples]:
    """Read and encode the examples of --train and of --valid.

    kind: of KINDS. separators: between two texts. longest: of the model's rows, in
    tokens; what does not fit in them is said. Raises UserError.
    """
    columns = {"--text": args.text or TEXT_COLUMNS.get(kind)}
    if args.text_pair:
        columns["--text_pair"] = args.text_pair
    form = Form(
        columns=tuple(columns.values()),
        label=args[kind].value,
        labels=tuple(filter(None, args.labels.split(","))),
        separators=separators,
        metrics=(args.metric,),
    )
    columns[f"--{kind}"] = form.label
    check_label(columns)
    files = {"--train": args.train, "--valid": args.valid}
    sample = (args.max_words, args.seed, cli.say)
    if kind == "label":
        parts: Sequence[Examples] = read_texts(files, columns, form, tokenizer)
    elif kind == "tag":
        parts = read_words(files, columns, form, tokenizer, *sample)
    else:
        parts = read_spans(files, columns, form, tokenizer, *sample)
    for flag, part in zip(files, parts, strict=True):
        is_text = isinstance(part, Texts)
        for note in part.plan(longest).notes() if is_text else part.notes(longest):
            cli.say(f"{flag}: {note}")
    return parts


def read_texts(
    files: Mapping[str, str], columns: Mapping[str, str], form: Form, tokenizer: Any
) -> list[Texts]:
    """Read texts out of tables: {flag: files}, the training rows' first."""
    parts = [tables.read_rows(v, flag, columns, cli.say) for flag, v in files.items()]
    if not form.labels:
        labels = read_labels(parts[0], form.label, SCORES, "--label")
        form = form._replace(labels=labels)
    return [
        make_texts(rows, form, tokenizer, True, cli.say, "--labels") for rows in parts
    ]


def example_ids(part: Examples) -> Iterator[np.ndarray]:
    """Yield the ids of each example, -1 behind each text or span.

    Examples with the same ids are of one type, as a control task has them.
    """
    for i in range(len(part.labels)):
        is_text = isinstance(part, Texts)
        texts = [text[i] for text in part.texts] if is_text else part.pieces(i)
        yield np.concatenate([x for ids in texts for x in (ids, [-1])])
