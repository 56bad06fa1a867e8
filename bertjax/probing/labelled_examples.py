# SPDX-License-Identifier: Apache-2.0
"""Labelled texts, words and spans, read as the flags of bertjax.probe ask for them.

Of words and spans, what of edge probing (Tenney et al. 2019, What do you learn from
context?) stands before the probe: a labelled span, or two of them, make a vector; a
word is a span of one. Its pieces are averaged, where they learn a pooling.

Spans are read out of JSON lines, an object a line, as the edge probing of jiant has
them: a text whose words stand between spaces (or a list of words), and a list of
targets, each with a span of words, the end not in it, perhaps a second one, and a
label:

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
# The text's column, where --text does not name one.
TEXT_COLUMNS = {"tag": tag.TASK_TYPE.columns["text"], "targets": "text"}
POOLINGS = dict.fromkeys(("mean", "first"))  # of a span's pieces
NAMES = ("span1", "span2")
SCORES = "a probe tells classes, and these look like scores"


@dataclass(frozen=True, eq=False)
class Spans:
    """Labelled spans of encoded sentences.

    spans: i64 [n, k, 2]: k = 1 or 2 spans make an example, each the words [begin, end)
    as they are numbered through all sentences. labels: i32 [n]. first: a span is its
    first piece, otherwise the mean of all.
    """

    words: tag.Tags
    spans: np.ndarray
    labels: np.ndarray
    first: bool = False

    @property
    def form(self) -> Form:
        """Whose labels are the names of the classes."""
        return self.words.form

    def pieces(self, i: int) -> list[np.ndarray]:
        """Return the pieces of each span of an example: i32 [pieces]."""
        offsets, tokens = self.words.words.offsets, self.words.words.tokens
        return [tokens[offsets[a] : offsets[b]] for a, b in self.spans[i]]

    def locate(self, plan: tag.Tags) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return each span's row and its positions [begin, end) there: i64 [n, k] each.

        plan: the sentences, laid out. Words of a span that stand in a later row than
        its first one are not in it (`notes` counts them).

        Worked example: words of 1, 2 and 1 pieces in one row behind [CLS]; the span of
        the second and the third -> row 0, positions 2 to 5.
        """
        head, stop = self.spans[..., 0], self.spans[..., 1]
        row = np.searchsorted(plan.rows, head, side="right") - 1
        tail = np.minimum(stop, plan.rows[row + 1]) - 1
        begin = plan.firsts[head]
        end = begin + 1 if self.first else plan.firsts[tail] + plan.words.lengths[tail]
        return row, begin, np.minimum(end, plan.length - 1)

    def notes(self, longest: int) -> list[str]:
        """Say what does not fit in rows of at most `longest` tokens."""
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
    """Return {flag: files}, those of the training examples first."""
    return {"--train": args.train, "--valid": args.valid}


def read_texts(
    args: Any, columns: Columns, form: Form, tokenizer: Any, say: Say = cli.say
) -> list[Texts]:
    """Read texts out of tables, which have the columns {flag: column}: UserError."""
    files = files_of(args).items()
    parts = [tables.read_rows(value, flag, columns, say) for flag, value in files]
    if not form.labels:
        labels = read_labels(parts[0], form.label, SCORES, form.asking)
        form = form._replace(labels=labels)
    return [make_texts(rows, form, tokenizer, True, say) for rows in parts]


def read_words(
    args: Any, columns: Columns, form: Form, tokenizer: Any, say: Say = cli.say
) -> list[Spans]:
    """Read tagged sentences, each of whose words is an example: UserError.

    columns: {flag: column}, of the words and of the tags. See `choose` for how many.
    """
    parts = []
    for flag, value in files_of(args).items():
        sentences = tag_files.read_sentences(value, flag, columns, say)
        form = tag.find_tags(sentences, form)  # the training sentences'
        taken = choose([len(s.words) for s in sentences], args, flag, say)
        some = [sentences[i] for i in taken]
        words = tag.make_tags(some, form, tokenizer, True, say)
        at = np.arange(len(words.labels))
        parts.append(Spans(words, np.stack([at, at + 1], 1)[:, None], words.labels))
    return parts


class Target(NamedTuple):
    """spans: (first word, end) of each; row: the cells that hold its label."""

    spans: tuple[tuple[int, int], ...]
    row: Row


def read_spans(
    args: Any, columns: Columns, form: Form, tokenizer: Any, say: Say = cli.say
) -> list[Spans]:
    """Read sentences with targets, each of which is an example, as `read_words` does.

    columns: {flag: column}, of the text and of the targets. Raises UserError, naming
    the place.
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
    """Read a row's words and targets. Raises UserError."""
    words, targets = row.cells[text], row.cells[column]
    if isinstance(words, str):
        words = words.split()
    if not isinstance(words, list) or not all(isinstance(w, str) for w in words):
        raise UserError(f"{row.place}: {text} is no text, nor a list of words")
    if not isinstance(targets, list) or not all(isinstance(t, dict) for t in targets):
        raise UserError(f"{row.place}: {column} is no list of objects")
    return Sentence(words, None, row.place), [
        parse_target(target, f"{row.place}, target {i}", len(words))
        for i, target in enumerate(targets, 1)
    ]


def parse_target(target: Mapping[str, Any], place: str, words: int) -> Target:
    """Read one of a sentence of so many words. Raises UserError."""
    for name in ("span1", "label"):
        if name not in target:
            raise UserError(f"{place}: there is no {name}")
    spans = []
    for name in filter(target.__contains__, NAMES):
        span = target[name]
        if not isinstance(span, list) or [type(at) for at in span] != [int, int]:
            raise UserError(f"{place}: {name} is no [first word, end] but {span!r}")
        if not 0 <= span[0] < span[1] <= words:
            raise UserError(f"{place}: {name}={span} is no span of {words} words")
        spans.append((span[0], span[1]))
    return Target(tuple(spans), Row(target, place))


def choose(sizes: list[int], args: Any, flag: str, say: Say) -> np.ndarray:
    """Choose whole sentences of --max_words examples together: indices, rising.

    sizes: examples of each. They are drawn by --seed; says how many are left out, and
    raises UserError where all are.
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
    """Make the F1 of entities out of classes i64 [words]; the tags must be BIO's."""
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
    """Yield the ids of each example, -1 behind each text or span.

    Examples with the same ids are of one type, as a control task has them.
    """
    for i in range(len(part.labels)):
        is_text = isinstance(part, Texts)
        texts = [text[i] for text in part.texts] if is_text else part.pieces(i)
        yield np.concatenate([x for ids in texts for x in (ids, [-1])])
