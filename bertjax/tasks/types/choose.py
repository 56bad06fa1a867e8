# SPDX-License-Identifier: Apache-2.0
"""Multiple choice: rows of a context and several choices, one of which is right.

Each choice is a sequence, [CLS] context [SEP] question choice [SEP] (Devlin et al.
2019, section 4.4, without a question), cut like a pair of texts. If an example has
fewer choices than others, the missing ones are padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, registry
from bertjax.data.rendering import decode
from bertjax.tasks import tables, text_rows
from bertjax.tasks.tables import Row, Say, silent
from bertjax.tasks.task_rows import Batch, Form, Lines, Outputs, Ragged
from bertjax.tasks.task_type import TaskType


@dataclass(frozen=True, eq=False)
class Choices(text_rows.Texts):
    """Examples of multiple choice.

    texts: the contexts, and the endings, each a question with a choice. context i64
    [n]: the number of each example's context; the endings of example i are [first[i],
    first[i + 1]); labels i32 [n]: the number of the right choice; choices: C, the
    choices that each row has room for.
    """

    context: np.ndarray
    first: np.ndarray
    choices: int

    def arrays(self) -> list[np.ndarray | None]:
        *texts, labels = super().arrays()
        return [*texts, self.context, self.first, labels]

    def _kept(self, example: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return, for all choices of some examples: the number of the context, the
        number of the ending, and the tokens of both texts before and after they are
        cut, i64 [choices, 2]."""
        ending = np.concatenate([np.arange(*self.first[i : i + 2]) for i in example])
        context = np.repeat(self.context[example], np.diff(self.first)[example])
        numbers = zip(self.texts, (context, ending), strict=True)
        full = np.stack([text.lengths[of] for text, of in numbers], axis=1)
        return (
            context,
            ending,
            full,
            text_rows.kept_of(full, self.length - self.specials),
        )

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        *_, full, kept = self._kept(np.arange(len(self.context)))
        longest = np.maximum.reduceat(kept.sum(1), self.first[:-1])
        cut = np.add.reduceat((full - kept).sum(1), self.first[:-1])
        return longest + self.specials, cut

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make a batch: input_ids, attention_mask, token_type_ids i32 [b, C, L];
        choice_weights f32 [b, C], 1 where there is a choice; labels i32 [b].

        Context 7, choices 8 and 9 9, C = 3, length 6 ([CLS] 1, [SEP] 2, padding 0):

            input_ids  1  7  2  8  2  0    choice_weights  1
                       1  7  2  9  9  2                    1
                       0  0  0  0  0  0                    0
        """
        context, ending, _, kept = self._kept(example)
        contexts, endings = self.texts
        rows = [
            (contexts[i][:a], endings[k][:b])
            for i, k, (a, b) in zip(context, ending, kept, strict=True)
        ]
        is_choice = np.arange(self.choices) < np.diff(self.first)[example][:, None]
        how = is_choice, self.length, self.form.separators, specials
        return {
            "choice_weights": is_choice.astype(np.float32),
            **text_rows.lay_out_real(rows, *how),
            "labels": self.labels_of(example),
        }

    def describe(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        """Yield the sequence of each choice, and mark the right one."""
        right = -1 if self.labels is None else int(row["labels"])
        for k in np.flatnonzero(row["choice_weights"]).tolist():
            name = f"choice {self.label_names[k]}{' (right)' * (k == right)}"
            real = row["attention_mask"][k] > 0
            yield name, decode(tokenizer, row["input_ids"][k][real])

    @property
    def label_names(self) -> Sequence[str]:
        return self.form.labels or [*map(str, range(self.choices))]

    def answers(self, outputs: Outputs, read: Sequence[Row]) -> Iterator[Any]:
        """Yield {"label", "choice", "score", "scores"}: the number from 0 (or the name
        in task.labels) and the text of the likeliest choice, its probability, and the
        probabilities of all choices."""
        rows = [part for row in read for part in parted(row, self.form, False)]
        for row, logits in zip(rows, outputs["scores"], strict=True):
            choices = choices_of(row, self.form)
            odds = text_rows.softmax(np.float64(logits[: len(choices)])).tolist()
            best = odds.index(max(odds))
            yield {
                "label": self.form.labels[best] if self.form.labels else best,
                "choice": choices[best],
                "score": odds[best],
                "scores": odds,
            }


def make_choices(
    rows: Sequence[Row], form: Form, tokenizer: Any, labelled: bool, say: Say = silent
) -> Choices:
    """Encode rows, and report empty contexts and empty lists of questions.

    Raises UserError, naming the place, for invalid choices and labels.
    """
    question = form.columns[1]
    contexts = text_rows.encode_column(rows, form.columns[0], tokenizer, say)
    context, endings, sizes, labels = [], [], [], []
    bare = [row.place for row in rows if question and row.cells[question] == []]
    tables.report(say, bare, "row", f" without {question}, left out")
    if len(bare) == len(rows):
        raise UserError(
            f"{rows[0].place}: the list of {question} is empty, and so is every other"
        )
    for i, row in enumerate(rows):
        for part in parted(row, form, labelled):
            question_text = f"{text_rows.text_of(part, question)} " if question else ""
            choices = choices_of(part, form)
            context.append(i)
            endings += [question_text + choice for choice in choices]
            sizes.append(len(choices))
            if labelled:
                labels.append(label_of(part, form, len(choices)))
    choices_ids = Ragged.encode(tokenizer, endings)
    return Choices(
        form,
        contexts.counts(tokenizer) + choices_ids.counts(tokenizer),
        (contexts, choices_ids),
        np.array(context, np.int64),
        np.cumsum([0, *sizes]),
        max(sizes),
        labels=np.array(labels, np.int32) if labelled else None,
    )


def parted(row: Row, form: Form, labelled: bool) -> Iterator[Row]:
    """Yield one row per question of a row that holds a list of them, as RACE's do.

    Raises UserError if there are not as many lists of choices, and labels.
    """
    _, question, *columns = form.columns
    if not question or not isinstance(row.cells[question], list):
        yield row
        return
    names = [question, *columns, *([form.label] if labelled else [])]
    lists = {name: row.cells[name] for name in names}
    number = len(lists[question])
    for name, found in lists.items():
        if not isinstance(found, list) or len(found) != number:
            raise UserError(
                f"{row.place}: {name} has to be a list of {number}, as {question} is"
            )
    for k, cells in enumerate(zip(*lists.values(), strict=True), 1):
        parts = {**row.cells, **dict(zip(lists, cells, strict=True))}
        yield Row(parts, f"{row.place}, question {k}")


def choices_of(row: Row, form: Form) -> list[str]:
    """Return the texts of a row's choices. Raises UserError for invalid choices."""
    _, _, *columns = form.columns
    choices = row.cells[columns[0]]
    if len(columns) > 1:
        choices = [row.cells[column] for column in columns]
    elif not isinstance(choices, list):
        raise UserError(
            f"{row.place}: the {columns[0]} holds no list of choices: give "
            "a column for each, with commas"
        )
    for k, choice in enumerate(choices, 1):
        if not isinstance(choice, str) or not choice.strip():
            what = "is empty" if isinstance(choice, str) else f"is not text: {choice!r}"
            raise UserError(f"{row.place}: choice {k} {what}")
    if len(choices) < 2:
        raise UserError(f"{row.place}: there are less than two choices")
    if 0 < len(form.labels) < len(choices):
        counts = f"{len(form.labels)} choices, not {len(choices)}"
        raise UserError(f"{row.place}: task.labels names {counts}")
    return choices


def label_of(row: Row, form: Form, choices: int) -> int:
    """Return the number of the right choice: 0 to choices - 1.

    The label is one of form.labels; without these it is a number from 0, a letter from
    A, or the name of the choice's column. Raises UserError.
    """
    label = text_rows.label_of(row, form.label)
    names, index = form.labels or form.columns[2:], -1
    if not form.labels and label.isdecimal() and len(label) < 10:
        index = int(label)  # first, since columns without names are also numbers
    elif label in names:
        index = names.index(label)
    elif not form.labels and len(label) == 1 and label.isascii():
        index = ord(label.upper()) - ord("A")
    if not 0 <= index < choices:
        last = chr(ord("A") + choices - 1)
        known = ", ".join(form.labels) or f"0 to {choices - 1}, A to {last}"
        what = f"the {form.label} {label!r} is none of the {choices} choices: {known}"
        raise UserError(f"{row.place}: {what}")
    return index


def _check(config: ConfigDict) -> None:
    if not registry.split_list(config.task.choices):
        raise UserError(
            "task.choices is empty: name the columns of the choices, with commas, or "
            "the column that holds their list"
        )


def _name_columns(config: ConfigDict, names: list[str]) -> list[str]:
    """Parse TEXT[+QUESTION][,CHOICE...], and set task.choices if there is a CHOICE.

    Returns the columns of the context and of the question.
    """
    text, *choices = names
    config.task.choices = ",".join(choices) or config.task.choices
    return [part.strip() for part in text.split("+")]


TASK_TYPE = TaskType(
    make_rows=make_choices,
    metrics=("accuracy",),
    outputs=("scores",),
    check=_check,
    imported=lambda labels: {"choices": "choices"},
    name_columns=_name_columns,
    several_sequences=True,
    hf_class="ForMultipleChoice",
)
