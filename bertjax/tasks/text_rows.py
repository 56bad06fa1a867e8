# SPDX-License-Identifier: Apache-2.0
"""Rows of one or two texts and a label, for classification and regression.

A row is [CLS] first [SEP], or [CLS] first [SEP] second [SEP] (Devlin et al. 2019,
figure 4); RoBERTa's family has two separators between the texts. If a row is too long,
the longer of the two texts loses its last token until the row fits
(google-research/bert, run_classifier.py).
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.data.rendering import decode
from bertjax.tasks.metrics import METRICS
from bertjax.tasks.tables import NUMBER, Row, Say, report, silent
from bertjax.tasks.task_rows import (
    Asking,
    Batch,
    Form,
    Lines,
    Outputs,
    Ragged,
    Rows,
    min_mean_max,
    short,
)

BATCH = 256  # texts encoded at a time
FEW = 10  # up to so many rows or classes, nothing is suspicious
WHOLE = re.compile(r"-?[0-9]{1,18}")  # int() accepts these; \d would also match "²"


@dataclass(frozen=True, eq=False)
class Texts(Rows):
    """One row per example. labels: i32 classes, f32 scores, or None."""

    texts: tuple[Ragged, ...]

    def arrays(self) -> list[np.ndarray | None]:
        texts = chain.from_iterable((x.tokens, x.offsets) for x in self.texts)
        return [*texts, self.labels]

    @property
    def shortest(self) -> int:
        return self.specials + len(self.texts)

    @property
    def specials(self) -> int:
        """The number of special tokens in a row."""
        return 2 if len(self.texts) == 1 else 2 + self.form.separators

    @property
    def room(self) -> int:
        """The most tokens of a row, special ones included."""
        return self.length

    def kept(self, example: Any) -> np.ndarray:
        """Return how many tokens of each text a row keeps: i64 [b, texts].

        >>> Texts(..., length=11).kept([0])  # 6 and 9 tokens, room for 8
        array([[4, 4]])
        """
        full = np.stack([t.lengths[example] for t in self.texts], axis=1)
        return kept_of(full, self.room - self.specials)

    def kept_tokens(self, example: np.ndarray) -> list[list[np.ndarray]]:
        """Return the kept tokens of each text of some rows."""
        return [
            [text[i][:size] for text, size in zip(self.texts, sizes, strict=True)]
            for i, sizes in zip(example, self.kept(example), strict=True)
        ]

    @cached_property
    def text_sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """`sizes` for the texts only."""
        kept = self.kept(slice(None)).sum(axis=1)
        return kept + self.specials, sum(t.lengths for t in self.texts) - kept

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        return self.text_sizes

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make rows: input_ids, attention_mask, token_type_ids i32 [b, L], and labels.

        Nothing is drawn, so `keys` is not used. Texts 7 8 and 9, length 8 ([CLS] 1,
        [SEP] 2, padding 0):

            input_ids       1  7  8  2  9  2  0  0
            token_type_ids  0  0  0  0  1  1  0  0
            attention_mask  1  1  1  1  1  1  0  0
        """
        rows = self.kept_tokens(example)
        batch = lay_out(rows, self.length, self.form.separators, specials)
        return batch | {"labels": self.labels_of(example)}

    def describe(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        """Yield the text, the text_pair, and the label or score."""
        ids, types = row["input_ids"], row["token_type_ids"]
        for k, name in enumerate(("text", "text_pair")[: len(self.texts)]):
            is_part = (row["attention_mask"] > 0) & (types == k)
            yield name, decode(tokenizer, ids[is_part])
        if self.labels is not None and self.form.labels:
            yield "label", self.form.labels[row["labels"]]
        elif self.labels is not None:
            yield "score", f"{row['labels']:g}"

    def label_counts(self) -> dict[str, dict[str, float]]:
        if self.labels is None or self.label_names:
            return super().label_counts()
        return {"scores": min_mean_max(self.labels)}

    def score(self, outputs: Outputs, example: np.ndarray) -> dict[str, float]:
        """Compute the metrics from "scores", f32 [n, C] of classes, or f32 [n]."""
        scores, gold = np.asarray(outputs["scores"]), self.labels[example]
        predicted = scores.argmax(-1) if self.label_names else scores.astype(np.float64)
        return {name: METRICS[name](predicted, gold) for name in self.form.metrics}

    def answers(self, outputs: Outputs, read: Sequence[Row]) -> Iterator[Any]:
        """Yield {"label", "score", "probabilities"}, where score is the label's
        probability and probabilities are by label; or {"value"}."""
        scores = np.asarray(outputs["scores"])
        if not self.form.labels:
            yield from ({"value": float(value)} for value in scores)
            return
        for row in softmax(scores):
            shares = dict.fromkeys(self.form.labels, 0.0)
            for label, share in zip(self.form.labels, row.tolist(), strict=True):
                shares[label] += share  # several classes may have the same name
            best = max(shares, key=shares.__getitem__)
            yield {"label": best, "score": shares[best], "probabilities": shares}


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities [..., C] of logits [..., C]."""
    odds = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return odds / odds.sum(axis=-1, keepdims=True)


def kept_of(full: np.ndarray, room: int) -> np.ndarray:
    """Return how many tokens of one or two texts rows with this room keep.

    full: the numbers of all tokens, i64 [b, texts], like the result.
    """
    if full.shape[1] == 1:
        return np.minimum(full, room)
    a, b = full.T
    first = np.minimum(a, np.maximum(room - b, -(-room // 2)))
    return np.stack([first, np.minimum(b, room - first)], axis=1)


def lay_out(
    rows: Sequence[Sequence[np.ndarray]], length: int, separators: int, specials: Any
) -> Batch:
    """Make rows of texts that fit; arrays as from Texts.gather, without labels."""
    shape = len(rows), length
    ids = np.full(shape, specials.pad_id, np.int32)
    mask, types = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, texts in enumerate(rows):
        ids[row, 0], at = specials.cls_id, 1
        for k, text in enumerate(texts):
            if k:
                more = at + separators - 1
                ids[row, at:more] = specials.sep_id
                at = more
            end = at + len(text)
            ids[row, at:end] = text
            ids[row, end] = specials.sep_id
            types[row, at : end + 1] = k
            at = end + 1
        mask[row, :at] = 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def lay_out_real(
    texts: Sequence[Sequence[np.ndarray]],
    is_real: np.ndarray,
    length: int,
    separators: int,
    specials: Any,
) -> Batch:
    """Make rows of several sequences, i32 [b, C, L].

    They are those of `lay_out` where is_real, bool [b, C]; the others are padding.
    """
    batch: Batch = {}
    for name, values in lay_out(texts, length, separators, specials).items():
        empty = specials.pad_id if name == "input_ids" else 0
        batch[name] = np.full((*is_real.shape, length), empty, np.int32)
        batch[name][is_real] = values
    return batch


def find_labels(rows: Sequence[Row], form: Form) -> Form:
    """Return the form with the classes of the training rows, unless it has some.

    Raises UserError for labels that cannot be classes (`read_labels`), and for more
    classes than texts.
    """
    if form.labels:
        return form
    labels = read_labels(rows, form.label)
    texts = {tuple(text_of(row, c) for c in form.columns) for row in rows}
    if len(labels) > max(FEW, len(texts)):
        raise UserError(
            f"task.label={form.label}: {len(labels):,} classes ({_two(labels)}) of "
            f"{len(texts):,} different texts: are text and label swapped? The columns "
            f"are task.text={form.columns[0]} task.label={form.label}"
        )
    return form._replace(labels=labels)


def read_labels(
    rows: Sequence[Row],
    column: str,
    many: str = "for scores take --config.objective=regress",
    asking: Asking | None = None,
) -> tuple[str, ...]:
    """Return the labels of rows, sorted: whole numbers by value, others as strings.

    many: the advice of messages if labels look like scores; asking: the keys or flags
    for the column and for the labels ("" if there is none), for messages. Raises
    UserError for many numbers with decimals, for about one class per row, for an empty
    label, and for only one label.
    """
    asking = asking or Asking()
    found = dict.fromkeys(label_of(row, column) for row in rows)
    if len(found) == 1:
        what = f"{asking.label}={column}"
        raise UserError(f"{what}: every row has the label {min(found)!r}")
    summary = f"{asking.label}={column}: {len(found):,} labels in {len(rows):,} rows"
    summary += f" ({_two(found)})"
    numbers = all(map(NUMBER.fullmatch, found))
    if numbers and len(found) > FEW and any(float(label) % 1 for label in found):
        raise UserError(f"{summary} are numbers with decimals: {many}")
    if len(rows) > FEW and len(found) > len(rows) / 2:
        why = (
            "nearly each row would be a class of its own; name the column of the labels"
        )
        if asking.labels:
            why += f", or list the classes in {asking.labels} if these are meant"
        raise UserError(f"{summary}: {many if numbers else why}")
    whole = all(WHOLE.fullmatch(label) for label in found)
    return tuple(sorted(found, key=int if whole else None))


def _two(labels: Iterable[str]) -> str:
    return ", ".join(repr(short(label, 30)) for label in islice(labels, 2))


def make_texts(
    rows: Sequence[Row], form: Form, tokenizer: Any, labelled: bool, say: Say = silent
) -> Texts:
    """Encode rows, and report empty cells. Raises UserError for labels that do not fit
    the form."""
    texts = [encode_column(rows, c, tokenizer, say) for c in form.columns]
    labels = None
    if labelled and form.labels:
        cells = ((label_of(row, form.label), row.place) for row in rows)
        labels = form.class_numbers(cells, f"{form.asking.labels}: the label")
    elif labelled:
        labels = scores_of(rows, form.label)
    counts = sum(text.counts(tokenizer) for text in texts)
    return Texts(form, counts, tuple(texts), labels=labels)


def encode_column(rows: Sequence[Row], column: str, tokenizer: Any, say: Say) -> Ragged:
    """Encode the texts of a column, and report empty ones."""
    cells = [text_of(row, column) for row in rows]
    empty = [r.place for r, c in zip(rows, cells, strict=True) if not c.strip()]
    report(say, empty, "row", f" with an empty {column}, kept")
    return Ragged.encode(tokenizer, cells)


def cell(row: Row, column: str) -> str:
    """Return the value of a cell as text, without surrounding spaces.

    JSON's true and false become "true" and "false"; null and NaN become "". Raises
    UserError for a list or an object.
    """
    value = row.cells[column]
    if isinstance(value, (list, dict)):
        raise UserError(
            f"{row.place}: the {column} has to be a label, and is {value!r}"
        )
    if value is None or value != value:  # NaN, as pandas writes a missing one
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def label_of(row: Row, column: str) -> str:
    """Return the value of a cell, as `cell` does. Raises UserError if it is empty."""
    label = cell(row, column)
    if not label:
        raise UserError(f"{row.place}: the {column} is empty")
    return label


def text_of(row: Row, column: str) -> str:
    """Return a cell's text unchanged. Raises UserError if it is not a text."""
    value = row.cells[column]
    if not isinstance(value, str):
        raise UserError(f"{row.place}: the {column} has to be a text, and is {value!r}")
    return value


def scores_of(rows: Sequence[Row], column: str) -> np.ndarray:
    """Return the numbers of a column, f32 [n]. Raises UserError for other values."""
    cells = [cell(row, column) for row in rows]
    numbers = [float(text) if NUMBER.fullmatch(text) else np.nan for text in cells]
    with np.errstate(over="ignore"):
        out = np.array(numbers, np.float32)
    for i in np.flatnonzero(~np.isfinite(out))[:1]:
        what = f"the {column} {cells[i]!r} has to be a number"
        raise UserError(f"{rows[i].place}: {what}")
    return out


def encode_with_chars(
    tokenizer: Any, texts: Sequence[str]
) -> tuple[Ragged, np.ndarray]:
    """Encode texts; also return each token's characters [begin, end) in its text.

    The characters, i32 [tokens, 2], include combining marks after the token that the
    tokenizer drops.
    """
    pieces: list[list[int]] = []
    chars = [np.zeros((0, 2), np.int32)]
    for at in range(0, len(texts), BATCH):
        batch = texts[at : at + BATCH]
        encoded = tokenizer.encode_with_offsets(batch)
        for text, (ids, spans) in zip(batch, encoded, strict=True):
            pieces.append(ids)
            spans = _with_marks(spans, text)
            chars.append(np.array(spans, np.int32).reshape(-1, 2))
    return Ragged.of(pieces), np.concatenate(chars)


def _with_marks(spans: list[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Extend each span by the combining marks between it and the next one.

    Tokenizers drop these accents and vowel signs; without them an answer would end in
    the middle of a letter.

    >>> _with_marks([(0, 1), (3, 4)], "นี้ก")
    [(0, 3), (3, 4)]
    """
    if text.isascii():
        return spans
    whole = []
    for (begin, end), (following, _) in pairwise([*spans, (len(text), 0)]):
        while begin < end < following and unicodedata.category(text[end]) == "Mn":
            end += 1
        whole.append((begin, end))
    return whole
