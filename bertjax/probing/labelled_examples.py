# SPDX-License-Identifier: Apache-2.0
"""Labeled texts, words and spans, as the flags of bertjax.probe select them.

Words and spans are represented as in edge probing (Tenney et al. 2019, What do you
learn from context?): one labeled span, or two of them, become one vector; a word is a
span of one word. Here the pieces of a span are averaged, while edge probing learns a
pooling.

Spans are read from JSON lines in the format of jiant's edge probing. Each line is an
object with a text of space-separated words (or a list of words) and a list of targets.
A target has a span of words without its end, optionally a second span, and a label:

{"text": "Ann lives in Bonn", "targets": [{"span1": [0, 1], "span2": [3, 4],
 "label": "lives-in"}]}
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from bertjax import UserError
from bertjax.config import cli
from bertjax.data import counter_rng
from bertjax.tasks import metrics, tables, tag_files
from bertjax.tasks.tables import Columns, Row, Say
from bertjax.tasks.tag_files import Sentence
from bertjax.tasks.task_rows import Asking, Form, check_label
from bertjax.tasks.text_rows import Texts, cell, make_texts, read_labels
from bertjax.tasks.types import tag

KINDS = {"label": "rows", "tag": "words", "targets": "spans"}  # flag -> its examples
# The column of the text if --text does not name one.
TEXT_COLUMNS = {"tag": tag.TASK_TYPE.columns["text"], "targets": "text"}
POOLINGS = dict.fromkeys(("mean", "first"))  # poolings of a span's pieces
NAMES = ("span1", "span2")
SCORES = "a probe tells classes, and these look like scores"


@dataclass(frozen=True, eq=False)
class Spans:
    """Labeled spans of encoded sentences.

    spans: i64 [n, k, 2], with k = 1 or 2 spans per example, each the words [begin, end)
    numbered through all sentences. labels: i32 [n]. first: represent a span by its
    first piece, otherwise by the mean of all.
    """

    words: tag.Tags
    spans: np.ndarray
    labels: np.ndarray
    first: bool = False

    @property
    def form(self) -> Form:
        """The form, which has the names of the classes."""
        return self.words.form

    def pieces(self, i: int) -> list[np.ndarray]:
        """Return the pieces of each span of an example: i32 [pieces]."""
        offsets, tokens = self.words.words.offsets, self.words.words.tokens
        return [tokens[offsets[a] : offsets[b]] for a, b in self.spans[i]]

    def locate(self, plan: tag.Tags) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return each span's row and its positions [begin, end) there: i64 [n, k] each.

        plan: the rows of the sentences. Words of a span in a later row than its first
        word are left out (`notes` counts such examples).

        Worked example: words of 1, 2 and 1 pieces in one row after [CLS]; the span of
        the second and the third -> row 0, positions 2 to 5.
        """
        head, stop = self.spans[..., 0], self.spans[..., 1]
        row = np.searchsorted(plan.rows, head, side="right") - 1
        tail = np.minimum(stop, plan.rows[row + 1]) - 1
        begin = plan.firsts[head]
        end = begin + 1 if self.first else plan.firsts[tail] + plan.words.lengths[tail]
        return row, begin, np.minimum(end, plan.length - 1)

    def notes(self, longest: int) -> list[str]:
        """Return notes about what does not fit in rows of at most `longest` tokens."""
        plan = self.words.plan(longest)
        row = np.searchsorted(plan.rows, self.spans[..., 0], side="right") - 1
        cut = int((self.spans[..., 1] > plan.rows[row + 1]).any(1).sum())
        note = f"{cut:,} of {len(row):,} examples lose words of a span to the next row"
        return [*plan.notes(), *([note] if cut else [])]


Examples = Texts | Spans


def read_examples(
    args: flags.FlagValues, kind: str, separators: int, tokenizer: Any, longest: int
) -> Sequence[Examples]:
    """Read and encode the examples of --train and of --valid.

    kind: a key of KINDS. separators: the number of [SEP] between two texts. longest:
    the most tokens of the model's rows; examples that do not fit are reported. Raises
    UserError.
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
        asking=Asking(f"--{kind}", "--labels", "--metric"),
    )
    columns[f"--{kind}"] = form.label
    check_label(columns)
    read = {"label": read_texts, "tag": read_words, "targets": read_spans}[kind]
    parts = read(args, columns, form, tokenizer)
    for flag, part in zip(files_of(args), parts, strict=True):
        is_text = isinstance(part, Texts)
        for note in part.plan(longest).notes() if is_text else part.notes(longest):
            cli.say(f"{flag}: {note}")
    return parts


def files_of(args: Any) -> dict[str, str]:
    """Return {flag: files}; the training examples come first."""
    return {"--train": args.train, "--valid": args.valid}


def read_texts(
    args: Any, columns: Columns, form: Form, tokenizer: Any, say: Say = cli.say
) -> list[Texts]:
    """Read texts from tables; columns: {flag: column}. Raises UserError."""
    files = files_of(args).items()
    parts = [tables.read_rows(value, flag, columns, say) for flag, value in files]
    if not form.labels:
        labels = read_labels(parts[0], form.label, SCORES, form.asking)
        form = form._replace(labels=labels)
    return [make_texts(rows, form, tokenizer, True, say) for rows in parts]


def read_words(
    args: Any, columns: Columns, form: Form, tokenizer: Any, say: Say = cli.say
) -> list[Spans]:
    """Read tagged sentences; each of their words is an example.

    columns: {flag: column}, of the words and of the tags. `choose` limits their number.
    Raises UserError.
    """
    parts = []
    for flag, value in files_of(args).items():
        sentences = tag_files.read_sentences(value, flag, columns, say)
        form = tag.find_tags(sentences, form)  # the tags of the training sentences
        taken = choose([len(s.words) for s in sentences], args, flag, say)
        some = [sentences[i] for i in taken]
        words = tag.make_tags(some, form, tokenizer, True, say)
        at = np.arange(len(words.labels))
        parts.append(Spans(words, np.stack([at, at + 1], 1)[:, None], words.labels))
    return parts


class Target(NamedTuple):
    """A target. spans: (first word, end) of each; row: the cells with its label."""

    spans: tuple[tuple[int, int], ...]
    row: Row


def read_spans(
    args: Any, columns: Columns, form: Form, tokenizer: Any, say: Say = cli.say
) -> list[Spans]:
    """Read sentences with targets; each target is an example.

    columns: {flag: column}, of the text and of the targets. `choose` limits their
    number. Raises UserError with the file and line.
    """
    (_, text), (flag_of_targets, column) = columns.items()
    files, read, parts = files_of(args), [], []
    for flag, value in files.items():
        rows = tables.read_rows(value, flag, columns, say)
        parsed = [parse(row, text, column) for row in rows]
        if not any(targets for _, targets in parsed):
            raise UserError(f"{flag}={value}: there is no span")
        read.append(parsed)
    numbers = {len(t.spans): t for part in read for _, ts in part for t in ts}
    if len(numbers) > 1:
        raise UserError(f"{numbers[1].row.place}: other targets have a second span")
    if not form.labels:
        rows = [target.row for _, targets in read[0] for target in targets]
        asking = form.asking._replace(label=flag_of_targets)
        labels = read_labels(rows, "label", SCORES, asking)
        form = form._replace(label="label", labels=labels)
    for flag, parsed in zip(files, read, strict=True):
        taken = choose([len(targets) for _, targets in parsed], args, flag, say)
        some = [parsed[i] for i in taken]
        words = tag.make_tags([s for s, _ in some], form, tokenizer, False, say)
        at = np.repeat(words.sentences[:-1], [len(targets) for _, targets in some])
        targets = [target for _, targets in some for target in targets]
        places = np.array([target.spans for target in targets]) + at[:, None, None]
        names = ((cell(target.row, "label"), target.row.place) for target in targets)
        labels = form.class_numbers(names, f"{form.asking.labels}: the label")
        parts.append(Spans(words, places, labels))
    return parts


def parse(row: Row, text: str, column: str) -> tuple[Sentence, list[Target]]:
    """Parse a row's words and targets. Raises UserError."""
    words, targets = row.cells[text], row.cells[column]
    if isinstance(words, str):
        words = words.split()
    if not isinstance(words, list) or not all(isinstance(w, str) for w in words):
        raise UserError(f"{row.place}: {text} is not text, nor a list of words")
    if not isinstance(targets, list) or not all(isinstance(t, dict) for t in targets):
        raise UserError(f"{row.place}: {column} is not a list of objects")
    return Sentence(words, None, row.place), [
        parse_target(target, f"{row.place}, target {i}", len(words))
        for i, target in enumerate(targets, 1)
    ]


def parse_target(target: Mapping[str, Any], place: str, words: int) -> Target:
    """Parse a target of a sentence with this number of words. Raises UserError."""
    for name in ("span1", "label"):
        if name not in target:
            raise UserError(f"{place}: there is no {name}")
    spans = []
    for name in filter(target.__contains__, NAMES):
        span = target[name]
        if not isinstance(span, list) or [type(at) for at in span] != [int, int]:
            raise UserError(f"{place}: {name} is no [first word, end] but {span!r}")
        if not 0 <= span[0] < span[1] <= words:
            raise UserError(f"{place}: {name}={span} is not a span of {words} words")
        spans.append((span[0], span[1]))
    return Target(tuple(spans), Row(target, place))


def choose(sizes: list[int], args: Any, flag: str, say: Say) -> np.ndarray:
    """Choose whole sentences with at most --max_words examples in all.

    sizes: the number of examples in each sentence. Returns ascending indices, drawn by
    --seed. Reports how many are left out, and raises UserError if all are.
    """
    most = args.max_words
    order = np.argsort(counter_rng.fold(args.seed, "choose", np.arange(len(sizes))))
    taken = np.sort(order[np.cumsum(np.array(sizes)[order]) <= most])
    n, total = sum(sizes[i] for i in taken), sum(sizes)
    if not n:
        raise UserError(f"{flag}: no sentence fits: --max_words={most}")
    if n < total:
        say(
            f"{flag}: {n:,} of {total:,} examples are taken, those of {len(taken):,} "
            f"of {len(sizes):,} sentences: --max_words={most}"
        )
    return taken


def entity_f1(words: tag.Tags) -> metrics.Metric:
    """Return the metric F1 of entities from classes i64 [words]; tags must be BIO."""
    names = np.array(words.form.labels, object)
    ends = words.sentences[1:-1]

    def score(predicted: np.ndarray, gold: np.ndarray) -> float:
        tags = (
            [part.tolist() for part in np.split(names[classes], ends)]
            for classes in (predicted, gold)
        )
        return metrics.entity_scores(*tags)["f1"]

    return score


def example_ids(part: Examples) -> Iterator[np.ndarray]:
    """Yield the ids of each example, with -1 after each text or span.

    In a control task examples with the same ids are of one type.
    """
    for i in range(len(part.labels)):
        is_text = isinstance(part, Texts)
        texts = [text[i] for text in part.texts] if is_text else part.pieces(i)
        yield np.concatenate([x for ids in texts for x in (ids, [-1])])
