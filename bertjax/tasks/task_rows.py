# SPDX-License-Identifier: Apache-2.0
"""What the rows of every task share: their form, ragged arrays of ids, identity.

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
Lines = Iterator[tuple[str, str]]  # what it is, a line of text
Outputs = Mapping[str, Sequence[np.ndarray]]  # what a model says of each row, by name
ASKING = (  # for columns: config keys, flags
    ("task.text", "task.text_pair", "task.choices", "task.label"),
    ("--columns: TEXT", "--columns: TEXT_PAIR", "--columns: CHOICE", "--label"),
)


class Limits(NamedTuple):
    """In pieces: from the beginning of a window of a context to that of the next; of a
    question, and of an answer, at most. google-research/bert's unless said otherwise.
    """

    stride: int = 128
    question_length: int = 64
    answer_length: int = 30


class Targets(NamedTuple):
    """How texts are learnt (types/seq2seq.py): their longest, in pieces, and where.

    place: "prefix", behind a text that sees all of itself; "causal", behind one whose
    tokens see those before them alone; "decoder", in arrays of their own. bare: nothing
    begins a text or a target, and a decoder starts with padding (T5).
    """

    length: int
    place: str = "prefix"
    bare: bool = False

    @property
    def width(self) -> int:
        """Tokens that are predicted of a target at most, special ones included."""
        return self.length + (2 if self.place == "decoder" and not self.bare else 1)


class Asking(NamedTuple):
    """The keys, or flags, that messages name: of a column, its labels, the metrics."""

    label: str = "task.label"
    labels: str = "task.labels"
    metrics: str = "--config.task.metrics"


class Form(NamedTuple):
    """What a task's rows look like.

    columns: of the text, and of the second one; of choices those of the context, of the
    question or "", and of the choices. label: the column. labels: names in the order of
    their classes, () where the label is a score. separators: between two texts.
    metrics: names of the task type's. limits: of questions. targets: where labels are
    texts. drawn: given negatives of a query in a row, at most. candidates: of a query,
    to score. passages: of a question in a row, index: where their vectors are
    (types/read.py). asking: for messages. graph: of completion, of all its triples
    (graphs.py). settings: what else a type knows of config.task.
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
        """Return the text that `Rows.content_hash` covers; workdirs hold the hash.

        Its words must stay as they are, whatever the fields are called.
        """
        limits = ""
        if self.limits != (128, 64, 30):  # workdirs older than the limits have no word
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
        """Return {what asks: column} of the columns that a table needs, the texts'
        first, the label's last.

        Config keys ask, or the flags of predict and evaluate, which messages name.
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
        """Return the place of each label among the names of the classes: i32 [n].

        labels: (label, where it stands); source: the key or flag that gave the names,
        and what a label is. Raises UserError for a label that is none of them.

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
    """Refuse a label that a model would read as text, and a text twice. UserError.

    keys: {what asks: column}, the label's last, as `Form.keys` has them.
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
        """Put lists of ids one after the other."""
        offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        tokens = np.fromiter(chain.from_iterable(texts), np.int32, offsets[-1])
        return cls(tokens, offsets)

    @classmethod
    def encode(cls, tokenizer: Any, texts: Sequence[str]) -> Self:
        """Encode texts in blocks: what a tokenizer returns is thirty times as large."""
        blocks = range(0, max(len(texts), 1), BLOCK)
        parts = [cls.of(tokenizer.encode_batch(texts[i : i + BLOCK])) for i in blocks]
        lengths = np.concatenate([part.lengths for part in parts])
        tokens = np.concatenate([part.tokens for part in parts])
        return cls(tokens, np.concatenate([[0], np.cumsum(lengths)]))

    def __getitem__(self, i: int) -> np.ndarray:
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """i64 [texts]."""
        return np.diff(self.offsets)

    def counts(self, tokenizer: Any) -> np.ndarray:
        """Count how often each id of a vocabulary occurs: i64 [V]."""
        return np.bincount(self.tokens, minlength=tokenizer.vocab_size)


@dataclass(frozen=True, eq=False)
class Rows:
    """Labelled examples, once `plan(length)` has laid them out.

    counts: i64 [V], how often each id occurs. labels: of each example, None where there
    are none. length: tokens of a sequence, 0 without a layout; planned: the layout's,
    of which some rows narrow `length`. Of the class: choices, sequences in a row;
    shortest, tokens that a sequence needs; label_kind, what labels are called; writes,
    whether the model's own texts score or answer them (generation/answers.py);
    has_tables, whether a step searches their `tables`.
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
        """Of every row the tokens that it holds, special ones included, and those that
        it has no room for: i64 [n] each."""
        raise NotImplementedError

    @property
    def n(self) -> int:
        """The number of rows."""
        return len(self.lengths())

    @property
    def candidates(self) -> Any:
        """What answers are chosen among, where a head is to be given it."""
        return None

    @property
    def tables(self) -> Mapping[str, np.ndarray]:
        """What a step of laid out rows searches: arrays [N, ...] (Objective.tables)."""
        return {}

    def lengths(self) -> np.ndarray:
        """Return the tokens of every row, special ones included: i64 [n]."""
        return self.sizes[0]

    def truncated(self, example: Any, keys: Any = None) -> np.ndarray:
        """Count the tokens that a row has no room for: i64 [b]."""
        return self.sizes[1][example]

    def arrays(self) -> list[np.ndarray | None]:
        """List what decides batches, beside the form."""
        raise NotImplementedError

    def plan(self, length: int) -> Self:
        """Lay the rows out for another length. UserError when it is too short."""
        if length < self.shortest:
            need = f"rows need {self.shortest}"
            raise UserError(f"data.length={length} is too short: {need}")
        return replace(self, length=length, planned=length)

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make rows; labels are 0 where there are none."""
        raise NotImplementedError

    def labels_of(self, example: np.ndarray) -> np.ndarray:
        """Return the labels of some rows, i32 zeros where there are none."""
        none = np.zeros(len(example), np.int32)
        return none if self.labels is None else self.labels[example]

    def for_scores(self) -> "Rows":
        """Return the rows that a validation set of these examples is scored by."""
        return self

    @property
    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of the training rows, for those who open it."""
        return {"labels": list(self.form.labels)}

    @property
    def scores(self) -> tuple[str, ...]:
        """What `score` computes, the first of them what counts: the form's metrics."""
        return self.form.metrics

    def score(self, outputs: Outputs, example: np.ndarray) -> dict[str, float]:
        """Compute the `scores` of what a model says of these rows."""
        raise NotImplementedError

    def parts(self, outputs: Outputs, example: np.ndarray) -> dict[str, Any]:
        """Compute what `score` sums up, by what tells its parts: {"types": {...}}."""
        return {}

    def answers(self, outputs: Outputs, read: Sequence[Any]) -> Iterator[Any]:
        """Yield what is said of each example, as people read it.

        outputs: of all rows; read: what the examples were made of.
        """
        raise NotImplementedError

    def tell(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        """Yield (what it is, a line) of an example as the model gets it, and of what is
        right; row: what `gather` makes of it, without the batch's axis."""
        yield "text", decode(tokenizer, row["input_ids"][row["attention_mask"] > 0])

    @property
    def label_names(self) -> Sequence[str]:
        """The names of the classes, where labels are their numbers."""
        return self.form.labels

    def label_counts(self) -> dict[str, dict[str, float]]:
        """Return what the labels are, and how often: {"labels": {"neg": 3, ...}}."""
        names = self.label_names
        if self.labels is None or not names:
            return {}
        counts = np.bincount(self.labels, minlength=len(names)).tolist()
        return {self.label_kind: dict(zip(names, counts, strict=True))}

    def summary(self) -> dict[str, Any]:
        """Return what a layout's rows are: how many, how long, how many are cut, and
        what labels they have."""
        return {
            "rows": self.n,
            "length": self.length,
            "row_tokens": quantiles(Counter(self.lengths().tolist())),
            "truncated_rows": int((self.sizes[1] > 0).sum()),
            **self.label_counts(),
        }

    def read_as(self, tokenizer: Any, labelled: bool = True) -> str:
        """Say in a line what was read: columns, rows, labels, and the first row."""
        counts = [f"; {say_counts(*of)}" for of in self.label_counts().items()]
        example = np.zeros(1, np.int64)
        batch = self.gather(example, counter_rng.fold(0, "first", example), tokenizer)
        row = {name: values[0] for name, values in batch.items()}
        first = "; ".join(f"{k} {short(v)}" for k, v in self.tell(row, 0, tokenizer))
        rows = f"{counted(self.n, 'row')}{self.of_columns(labelled)}{''.join(counts)}"
        return f"{rows}; the first: {first}"

    def of_columns(self, labelled: bool) -> str:
        """Say the columns that rows were read from."""
        keys = self.form.keys(labelled).items()
        return " of " + ", ".join(f"{k.removeprefix('task.')}={v}" for k, v in keys)

    findings = ()  # lines for a file: all of what was said with few examples

    def notes(self) -> Iterator[str]:
        """Yield what people should know of a layout."""
        if cut := int((self.sizes[1] > 0).sum()):
            yield f"{cut:,} of {self.n:,} rows are cut at {self.length}"

    @property
    def content_hash(self) -> str:
        """sha256 over everything that decides batches."""
        digest = hashlib.sha256(self.form.identity.encode())
        for array in self.arrays():
            digest.update(b"" if array is None else np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def check_ids(self, vocab_size: int) -> None:
        """Raise UserError when a text holds an id that is not below vocab_size."""
        largest = int(np.flatnonzero(self.counts).max(initial=0))
        if largest >= vocab_size:
            raise UserError(
                f"a text has the id {largest}, and the vocabulary {vocab_size} pieces"
            )


def min_mean_max(values: np.ndarray) -> dict[str, float]:
    """Return the least, the mean and the greatest of some numbers, by these names."""
    names = "min", "mean", "max"
    return {name: float(getattr(values, name)()) for name in names}


def say_counts(name: str, counts: Mapping[str, float], most: int = 10) -> str:
    """Say how often things occur, of many the most frequent.

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
    """Cut a text for a line of a message."""
    return text if len(text) <= most else f"{text[:most].rstrip()}..."
