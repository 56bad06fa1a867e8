# SPDX-License-Identifier: Apache-2.0
"""Rows of one text or two and a label: classification and regression.

[CLS] first [SEP], or [CLS] first [SEP] second [SEP] (Devlin et al. 2019, figure 4);
RoBERTa's family parts a pair by two separators. Where a row is too long, the longer of
the two texts loses its last token until it is not (google-research/bert,
run_classifier.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bertjax import UserError, registry
from bertjax.tasks import metrics
from bertjax.tasks.rows import Batch, Form, Outputs, Ragged, Rows, make_ragged, some
from bertjax.tasks.tables import Row


@dataclass(frozen=True, eq=False)
class Texts(Rows):
    """A row an example. labels: i32 classes, f32 scores, or None."""

    form: Form
    texts: tuple[Ragged, ...]
    labels: np.ndarray | None
    counts: np.ndarray
    length: int = 0

    @property
    def n(self) -> int:
        """The number of rows."""
        return len(self.texts[0].offsets) - 1

    def arrays(self) -> list[np.ndarray | None]:
        return [*(a for t in self.texts for a in (t.tokens, t.offsets)), self.labels]

    def plan(self, length: int) -> "Texts":
        least = self.specials + len(self.texts)
        if length < least:
            raise UserError(f"data.length={length} is too short: rows need {least}")
        return replace(self, length=length)

    @property
    def specials(self) -> int:
        """Special tokens in a row."""
        return 2 if len(self.texts) == 1 else 2 + self.form.separators

    def kept(self, example: np.ndarray) -> np.ndarray:
        """Return how many tokens of each text stand in a row: i64 [b, texts].

        >>> Texts(..., length=11).kept([0])  # 6 and 9 tokens, room for 8
        array([[4, 4]])
        """
        full = np.stack([t.lengths[example] for t in self.texts], axis=1)
        room = self.length - self.specials
        if len(self.texts) == 1:
            return np.minimum(full, room)
        a, b = full.T
        first = np.minimum(a, np.maximum(room - b, -(-room // 2)))
        return np.stack([first, np.minimum(b, room - first)], axis=1)

    def truncated(self, example: Any, keys: Any = None) -> np.ndarray:
        full = sum(t.lengths[example] for t in self.texts)
        return full - self.kept(example).sum(axis=1)

    def lengths(self) -> np.ndarray:
        return self.kept(np.arange(self.n)).sum(axis=1) + self.specials

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make rows: input_ids, attention_mask, token_type_ids i32 [b, L], and labels.

        Nothing is drawn, so `keys` play no part. The second text and its separator are
        of type 1.

        Worked example ([CLS] 1, [SEP] 2, padding 0): texts 7 8 and 9, length 8 ->
        1 7 8 2 9 2 0 0, types 0 0 0 0 1 1 0 0.
        """
        shape = len(example), self.length
        ids = np.full(shape, specials.pad_id, np.int32)
        mask, types = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        kept = self.kept(example)
        for row, (i, sizes) in enumerate(zip(example, kept, strict=True)):
            ids[row, 0], at = specials.cls_id, 1
            for k, (text, size) in enumerate(zip(self.texts, sizes, strict=True)):
                if k:
                    more = at + self.form.separators - 1
                    ids[row, at:more] = specials.sep_id
                    at = more
                end = at + size
                ids[row, at:end] = text[i][:size]
                ids[row, end] = specials.sep_id
                types[row, at : end + 1] = k
                at = end + 1
            mask[row, :at] = 1
        batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        none = np.zeros(len(example), np.int32)
        batch["labels"] = none if self.labels is None else self.labels[example]
        return batch

    def score(self, outputs: Outputs, example: np.ndarray) -> dict[str, float]:
        """Compute the metrics of "scores" f32 [n, C] of classes, or [n]."""
        scores, gold = np.asarray(outputs["scores"]), self.labels[example]
        predicted = scores.argmax(-1) if self.form.labels else scores.astype(np.float64)
        return {
            name: float(metrics.METRICS[name](predicted, gold))
            for name in self.form.metrics
        }

    def answers(self, outputs: Outputs, read: Sequence[Row]) -> Iterator[Any]:
        """Yield {"label", "score"}, the score its probability; or {"value"}."""
        scores = np.asarray(outputs["scores"])
        if not self.form.labels:
            yield from ({"value": float(value)} for value in scores)
            return
        odds = np.exp(scores - scores.max(axis=-1, keepdims=True))
        odds /= odds.sum(axis=-1, keepdims=True)
        for row in odds:
            best = int(row.argmax())
            yield {"label": self.form.labels[best], "score": float(row[best])}


def find_labels(rows: Sequence[Row], form: Form) -> Form:
    """Return the form with the classes of the training rows, unless it has some."""
    return form if form.labels else form._replace(labels=read_labels(rows, form.label))


def read_labels(rows: Sequence[Row], column: str) -> tuple[str, ...]:
    """Return the labels that rows have, whole numbers by size, others by the alphabet.

    Raises UserError for an empty label, and where there is only one.
    """
    found: dict[str, str] = {}
    for row in rows:
        label = _cell(row, column)
        if not label:
            raise UserError(f"{row.place}: the {column} is empty")
        found.setdefault(label, row.place)
    if len(found) == 1:
        raise UserError(f"task.label={column}: every row has the label {min(found)!r}")
    if len(found) > len(rows) / 2 and len(found) > 20:
        raise UserError(
            f"task.label={column}: {len(found):,} labels in {len(rows):,} rows: for "
            "scores take --config.objective=regress"
        )
    whole = all(label.lstrip("-").isdigit() for label in found)
    return tuple(sorted(found, key=int if whole else None))


def make_texts(
    rows: Sequence[Row],
    form: Form,
    tokenizer: Any,
    labelled: bool,
    say: Callable[[str], None] = lambda text: None,
) -> Texts:
    """Encode rows; says which cells are empty. Raises UserError for labels that do not
    go with the form."""
    texts = []
    for column in form.columns:
        cells = [_text(row, column) for row in rows]
        empty = [r.place for r, c in zip(rows, cells, strict=True) if not c.strip()]
        if empty:
            say(
                f"{len(empty):,} rows have an empty {column}, and are kept: "
                f"{some(empty)}"
            )
        texts.append(make_ragged(tokenizer.encode_batch(cells)))
    size = tokenizer.vocab_size
    counts = sum(np.bincount(text.tokens, minlength=size) for text in texts)
    labels = None
    if labelled:
        labels = _classes(rows, form) if form.labels else _scores(rows, form)
    return Texts(form, tuple(texts), labels, counts)


def _cell(row: Row, column: str) -> str:
    value = row.cells[column]
    return value.strip() if isinstance(value, str) else str(value)


def _text(row: Row, column: str) -> str:
    value = row.cells[column]
    if not isinstance(value, str):
        raise UserError(f"{row.place}: the {column} is no text but {value!r}")
    return value


def _classes(rows: Sequence[Row], form: Form) -> np.ndarray:
    index = {label: i for i, label in enumerate(form.labels)}
    out = np.empty(len(rows), np.int32)
    for i, row in enumerate(rows):
        label = _cell(row, form.label)
        if label not in index:
            if not label:
                raise UserError(f"{row.place}: the {form.label} is empty")
            raise UserError(
                f"{row.place}: "
                f"{registry.unknown('task.labels: the label', label, form.labels)}"
            )
        out[i] = index[label]
    return out


def _scores(rows: Sequence[Row], form: Form) -> np.ndarray:
    out = np.empty(len(rows), np.float32)
    for i, row in enumerate(rows):
        try:
            with np.errstate(over="ignore"):
                out[i] = float(_cell(row, form.label))
        except ValueError:
            out[i] = np.nan
        if not np.isfinite(out[i]):
            said = _cell(row, form.label)
            raise UserError(f"{row.place}: the {form.label} {said!r} is no number")
    return out
