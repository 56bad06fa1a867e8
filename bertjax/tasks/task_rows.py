# SPDX-License-Identifier: Apache-2.0
"""The base class of the rows of all tasks, their form, and ragged arrays of token ids.

`Batches` (data/batches.py) calls such rows a plan.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, Self

import numpy as np

from bertjax import UserError, counted, registry
from bertjax.data import counter_rng
from bertjax.data.batch_statistics import quantiles
from bertjax.data.rendering import decode

BLOCK = 1024  # texts that are encoded at a time
Batch = dict[str, np.ndarray]
Lines = Iterator[tuple[str, str]]  # (what it is, a line of text)
Outputs = Mapping[str, Sequence[np.ndarray]]  # a model's outputs per row, by name
ASKING = (  # the config keys, and the flags, that name columns
    ("task.text", "task.text_pair", "task.choices", "task.label"),
    ("--columns: TEXT", "--columns: TEXT_PAIR", "--columns: CHOICE", "--label"),
)


class Limits(NamedTuple):
    """Limits in pieces: from one window's begin to the next's; the most of a question
    and of an answer. The defaults are google-research/bert's.
    """

    stride: int = 128
    question_length: int = 64
    answer_length: int = 30


class Targets(NamedTuple):
    """How target texts are predicted (types/seq2seq.py): their most pieces, and where.

    place: "prefix", after a source that sees all of itself; "causal", after a causal
    source; "decoder", in arrays of their own. bare: source and target have no start
    token, and a decoder starts with padding (T5).
    """

    length: int
    place: str = "prefix"
    bare: bool = False

    @property
    def width(self) -> int:
        """The most predicted tokens of a target, special ones included."""
        return self.length + (2 if self.place == "decoder" and not self.bare else 1)


class Asking(NamedTuple):
    """The keys or flags that messages name: for the label, the labels, the metrics."""

    label: str = "task.label"
    labels: str = "task.labels"
    metrics: str = "--config.task.metrics"


class Form(NamedTuple):
    """What the rows of a task look like.

    columns: of the text, and of the second text if any; for multiple choice, of the
    context, the question (or "") and the choices. label: its column. labels: names in
    the order of their classes, () if the label is a score. separators: between two
    texts. metrics: names from the task type. limits: for questions. targets: if labels
    are texts. drawn: the most hard negatives per row. candidates: passages to score per
    query. passages: per question in a row; index: the directory of their vectors
    (types/read.py). asking: for messages. graph: for completion, of all triples
    (graphs.py). settings: other parts of config.task that a type needs.
    """

    columns: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    separators: int
    metrics: tuple[str, ...]
    limits: Limits = Limits()
    asking: Asking = Asking()
    targets: Targets | None = None
    drawn: int = 1
    candidates: int = 10
    graph: Any = None
    passages: int = 5
    index: str = ""
    settings: tuple[Any, ...] | None = None

    @property
    def identity(self) -> str:
        """Return the text that `Rows.content_hash` covers; workdirs store the hash.

        Its words must not change, even if fields are renamed.
        """
        limits = ""
        if self.limits != (128, 64, 30):  # as in workdirs from before there were limits
            limits = (
                f", limits=Limits(stride={self.limits.stride!r}, "
                f"question_length={self.limits.question_length!r}, "
                f"answer_length={self.limits.answer_length!r})"
            )
        if self.targets:
            limits += f", targets={(*self.targets,)!r}"
        if self.drawn != 1:
            limits += f", drawn={self.drawn}"
        if self.settings:
            limits += f", settings={(*self.settings,)!r}"
        return (
            f"Form(columns={self.columns!r}, label={self.label!r}, "
            f"labels={self.labels!r}, separators={self.separators!r}, "
            f"metrics={self.metrics!r}{limits})"
        )

    def keys(self, labelled: bool = True, flags: bool = False) -> dict[str, str]:
        """Return {config key: column} of the columns that a table needs.

        The texts' come first, the label's last. flags: with the flags of predict and
        evaluate instead of config keys, for messages.
        """
        text, pair, choice, label = ASKING[flags]
        label = label if flags else self.asking.label
        texts, choices = self.columns[:2], self.columns[2:]
        keys = dict(zip((text, pair), texts, strict=False))
        keys = {key: column for key, column in keys.items() if column}
        keys |= {f"{choice}[{i}]": column for i, column in enumerate(choices)}
        return keys | ({label: self.label} if labelled else {})

    def class_numbers(
        self, labels: Iterable[tuple[str, str]], source: str
    ) -> np.ndarray:
        """Return the class number of each label: i32 [n].

        labels: (label, its place); source: for messages, the key or flag with the class
        names, and what a label is. Raises UserError for an unknown label.

        >>> Form(..., labels=("neg", "pos")).class_numbers([("pos", "t.tsv:2")], "")
        array([1], dtype=int32)
        """
        index = {name: i for i, name in enumerate(self.labels)}
        out = []
        for label, place in labels:
            if label not in index:
                raise UserError(f"{place}: {registry.unknown(source, label, index)}")
            out.append(index[label])
        return np.array(out, np.int32)


def check_label(keys: Mapping[str, str]) -> None:
    """Raise UserError if the label's column is also a text's, or two texts share one.

    keys: {config key or flag: column}, the label's last, as from `Form.keys`.
    """
    *texts, (key, label) = keys.items()
    for name, column in texts:
        if column == label:
            what = f"{name}={column} and {key}={label} are one column"
            raise UserError(f"{what}: the label would be read with the text")
        if (first := next(k for k, v in texts if v == column)) != name:
            raise UserError(f"{first} and {name} are one column, {column!r}")


@dataclass(frozen=True, eq=False)
class Ragged:
    """Token ids i32 [tokens] of texts; text i is [offsets[i], offsets[i + 1])."""

    tokens: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]]) -> Self:
        """Concatenate lists of ids."""
        offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        tokens = np.fromiter(chain.from_iterable(texts), np.int32, offsets[-1])
        return cls(tokens, offsets)

    @classmethod
    def encode(cls, tokenizer: Any, texts: Sequence[str]) -> Self:
        """Encode texts in blocks, because a tokenizer's result is 30 times as large."""
        blocks = range(0, max(len(texts), 1), BLOCK)
        parts = [cls.of(tokenizer.encode_batch(texts[i : i + BLOCK])) for i in blocks]
        lengths = np.concatenate([part.lengths for part in parts])
        tokens = np.concatenate([part.tokens for part in parts])
        return cls(tokens, np.concatenate([[0], np.cumsum(lengths)]))

    def __getitem__(self, i: int) -> np.ndarray:
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens per text: i64 [texts]."""
        return np.diff(self.offsets)

    def counts(self, tokenizer: Any) -> np.ndarray:
        """Count how often each id of a vocabulary occurs: i64 [V]."""
        return np.bincount(self.tokens, minlength=tokenizer.vocab_size)


@dataclass(frozen=True, eq=False)
class Rows:
    """Labeled examples, which `plan(length)` lays out as rows.

    counts: i64 [V], how often each id occurs. labels: one per example, or None. length:
    tokens per sequence, 0 before `plan`; planned: the argument of `plan`, which may be
    more than `length`. Class attributes: choices, sequences per row; shortest, the
    fewest tokens of a sequence; label_kind, the name of labels; writes, whether rows
    are scored or answered by generated texts (generation/answers.py); has_tables,
    whether a step searches `tables`.
    """

    form: Form
    counts: np.ndarray
    labels: np.ndarray | None = field(default=None, kw_only=True)
    length: int = field(default=0, kw_only=True)
    planned: int = field(default=0, kw_only=True)

    choices = 1
    shortest = 3
    label_kind = "labels"
    writes = False
    has_tables = False

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """Per row, the tokens that it holds, special ones included, and the tokens that
        are cut off: i64 [n] each."""
        raise NotImplementedError

    @property
    def n(self) -> int:
        """The number of rows."""
        return len(self.lengths())

    @property
    def candidates(self) -> Any:
        """What answers are chosen from, for heads that need it; otherwise None."""
        return None

    @property
    def tables(self) -> Mapping[str, np.ndarray]:
        """The arrays [N, ...] that a step searches (Objective.tables)."""
        return {}

    def lengths(self) -> np.ndarray:
        """Return the number of tokens per row, special ones included: i64 [n]."""
        return self.sizes[0]

    def truncated(self, example: Any, keys: Any = None) -> np.ndarray:
        """Return the number of tokens cut off per row: i64 [b]."""
        return self.sizes[1][example]

    def arrays(self) -> list[np.ndarray | None]:
        """Return the arrays that determine batches, beside the form."""
        raise NotImplementedError

    def plan(self, length: int) -> Self:
        """Lay the rows out for a length. Raises UserError if it is too short."""
        if length < self.shortest:
            need = f"rows need {self.shortest}"
            raise UserError(f"data.length={length} is too short: {need}")
        return replace(self, length=length, planned=length)

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make a batch of rows; without labels these are 0."""
        raise NotImplementedError

    def labels_of(self, example: np.ndarray) -> np.ndarray:
        """Return the labels of some rows, or zeros i32 if there are none."""
        none = np.zeros(len(example), np.int32)
        return none if self.labels is None else self.labels[example]

    def for_scores(self) -> "Rows":
        """Return the rows by which these examples are scored as a validation set."""
        return self

    @property
    def facts(self) -> dict[str, Any]:
        """The facts about training rows that a checkpoint stores."""
        return {"labels": list(self.form.labels)}

    @property
    def scores(self) -> tuple[str, ...]:
        """The names of the metrics that `score` computes; the first is the main one."""
        return self.form.metrics

    def score(self, outputs: Outputs, example: np.ndarray) -> dict[str, float]:
        """Compute the metrics `scores` of a model's outputs for these rows."""
        raise NotImplementedError

    def parts(self, outputs: Outputs, example: np.ndarray) -> dict[str, Any]:
        """Compute the scores of parts of the rows: {"types": {...}}."""
        return {}

    def answers(self, outputs: Outputs, read: Sequence[Any]) -> Iterator[Any]:
        """Yield the answer to each example in readable form.

        outputs: of all rows; read: the examples that the rows were made from.
        """
        raise NotImplementedError

    def describe(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        """Yield (name, line) of an example as the model sees it, and of its label;
        row: its arrays from `gather`, without the batch axis."""
        yield "text", decode(tokenizer, row["input_ids"][row["attention_mask"] > 0])

    @property
    def label_names(self) -> Sequence[str]:
        """The names of the classes, if labels are class numbers."""
        return self.form.labels

    def label_counts(self) -> dict[str, dict[str, float]]:
        """Return how often each label occurs: {"labels": {"neg": 3, ...}}."""
        names = self.label_names
        if self.labels is None or not names:
            return {}
        counts = np.bincount(self.labels, minlength=len(names)).tolist()
        return {self.label_kind: dict(zip(names, counts, strict=True))}

    def summary(self) -> dict[str, Any]:
        """Return the rows' number and lengths, how many are cut, and label counts."""
        return {
            "rows": self.n,
            "length": self.length,
            "row_tokens": quantiles(Counter(self.lengths().tolist())),
            "truncated_rows": int((self.sizes[1] > 0).sum()),
            **self.label_counts(),
        }

    def read_as(self, tokenizer: Any, labelled: bool = True) -> str:
        """Describe in one line what was read: rows, columns, labels, the first row."""
        counts = [f"; {say_counts(*of)}" for of in self.label_counts().items()]
        example = np.zeros(1, np.int64)
        batch = self.gather(example, counter_rng.fold(0, "first", example), tokenizer)
        row = {name: values[0] for name, values in batch.items()}
        lines = self.describe(row, 0, tokenizer)
        first = "; ".join(f"{k} {short(v)}" for k, v in lines)
        rows = f"{counted(self.n, 'row')}{self.of_columns(labelled)}{''.join(counts)}"
        return f"{rows}; the first: {first}"

    def of_columns(self, labelled: bool) -> str:
        """Describe the columns that rows were read from."""
        keys = self.form.keys(labelled).items()
        return " of " + ", ".join(f"{k.removeprefix('task.')}={v}" for k, v in keys)

    findings = ()  # lines for a file, in full; messages show only a few examples

    def notes(self) -> Iterator[str]:
        """Yield messages about the layout, such as the number of cut rows."""
        if cut := int((self.sizes[1] > 0).sum()):
            yield f"{cut:,} of {self.n:,} rows are cut at {self.length}"

    @property
    def content_hash(self) -> str:
        """The sha256 of everything that determines batches."""
        digest = hashlib.sha256(self.form.identity.encode())
        for array in self.arrays():
            digest.update(b"" if array is None else np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def check_ids(self, vocab_size: int) -> None:
        """Raise UserError if a text has an id that is not below vocab_size."""
        largest = int(np.flatnonzero(self.counts).max(initial=0))
        if largest >= vocab_size:
            raise UserError(
                f"a text has the id {largest}, and the vocabulary {vocab_size} pieces"
            )


def min_mean_max(values: np.ndarray) -> dict[str, float]:
    """Return {"min", "mean", "max"} of some numbers."""
    names = "min", "mean", "max"
    return {name: float(getattr(values, name)()) for name in names}


def say_counts(name: str, counts: Mapping[str, float], most: int = 10) -> str:
    """Format counts in a line; if there are many, only the most frequent.

    >>> say_counts("labels", {"neg": 1200, "pos": 3})
    'labels neg (1,200), pos (3)'
    >>> say_counts("scores", {"min": 0.0, "max": 5.0})
    'scores min 0, max 5'
    """
    shown = counts if len(counts) <= most else dict(Counter(counts).most_common(most))
    parts = [
        f"{short(k)} {v:.4g}" if isinstance(v, float) else f"{short(k)} ({v:,})"
        for k, v in shown.items()
    ]
    more = f" and {len(counts) - most:,} more" if len(counts) > most else ""
    return f"{name} {', '.join(parts)}{more}"


def short(text: str, most: int = 60) -> str:
    """Cut a text to at most `most` characters, for a message."""
    return text if len(text) <= most else f"{text[:most].rstrip()}..."
