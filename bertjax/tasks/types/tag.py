# SPDX-License-Identifier: Apache-2.0
"""Tagging: rows of sentences whose words have tags (named entities, parts of speech).

A word's tag is predicted at its first piece; its other pieces do not count (Devlin et
al. 2019, section 5.3). A sentence that is too long is split into several rows at word
boundaries, and is joined again before it is scored.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np

from bertjax import UserError, counted, join_names
from bertjax.data.rendering import decode
from bertjax.tasks import metrics, tables, tag_files
from bertjax.tasks.tables import Say, silent
from bertjax.tasks.tag_files import Sentence
from bertjax.tasks.task_rows import Batch, Form, Lines, Outputs, Ragged, Rows
from bertjax.tasks.task_type import TaskType, class_option
from bertjax.tasks.text_rows import lay_out

OF_ENTITIES = ("f1", "precision", "recall")
METRICS = (*OF_ENTITIES, "accuracy")


@dataclass(frozen=True, eq=False)
class Tags(Rows):
    """Sentences; sentence s is the words [sentences[s], sentences[s + 1]).

    words: the pieces of each word, at least one. labels: i32 [words] or None. After
    `plan`, row r is the words [rows[r], rows[r + 1]), and firsts i64 [words] is the
    position of each word's first piece in its row.
    """

    words: Ragged
    sentences: np.ndarray
    rows: np.ndarray | None = None
    firsts: np.ndarray | None = None

    label_kind = "tags"

    def arrays(self) -> list[np.ndarray | None]:
        return [self.words.tokens, self.words.offsets, self.sentences, self.labels]

    def plan(self, length: int) -> Self:
        laid, room = super().plan(length), length - 2
        rows = split(np.minimum(self.words.lengths, room), self.sentences, room)
        offsets = self.words.offsets
        begins = np.repeat(offsets[rows[:-1]], np.diff(rows))
        return replace(laid, rows=rows, firsts=1 + offsets[:-1] - begins)

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        full = np.diff(self.words.offsets[self.rows])
        # Only a word that is longer than a row is cut; it has a row to itself.
        kept = np.minimum(full, self.length - 2)
        return kept + 2, full - kept

    def notes(self) -> Iterator[str]:
        inside = np.setdiff1d(self.rows, self.sentences)
        if long := len(np.unique(np.searchsorted(self.sentences, inside))):
            yield (
                f"{long:,} of {len(self.sentences) - 1:,} sentences are longer than "
                f"{self.length} and become {long + len(inside):,} rows"
            )
        yield from super().notes()

    def gather(self, example: np.ndarray, keys: Any, specials: Any) -> Batch:
        """Make rows: input_ids, attention_mask, token_type_ids, labels i32 [b, L], and
        label_weights f32 [b, L]: 1 where a word with a label begins, otherwise 0.

        Words 7 8 and 9 with labels 3 and 0, length 6 ([CLS] 1, [SEP] 2, padding 0):

            input_ids      1  7  8  9  2  0
            labels         0  3  0  0  0  0
            label_weights  0  1  0  1  0  0
        """
        words = [slice(*self.rows[r : r + 2]) for r in example]
        ends, room = self.words.offsets, self.length - 2
        rows = [[self.words.tokens[ends[w.start] : ends[w.stop]][:room]] for w in words]
        batch = lay_out(rows, self.length, 1, specials)
        labels = np.zeros((len(example), self.length), np.int32)
        weights = np.zeros(labels.shape, np.float32)
        if self.labels is not None:
            for row, w in enumerate(words):
                labels[row, self.firsts[w]] = self.labels[w]
                weights[row, self.firsts[w]] = 1
        return {**batch, "labels": labels, "label_weights": weights}

    def describe(self, row: Batch, example: int, tokenizer: Any) -> Lines:
        """Yield the text, and each word's pieces with its tag."""
        yield from super().describe(row, example, tokenizer)
        if self.labels is None:
            return
        begins = self.firsts[slice(*self.rows[example : example + 2])].tolist()
        # If a sentence has no words, there are no ends either.
        ends = [*begins[1:], int(row["attention_mask"].sum()) - 1][: len(begins)]
        names = self.form.labels
        words = (
            f"{decode(tokenizer, row['input_ids'][a:b])}/{names[row['labels'][a]]}"
            for a, b in zip(begins, ends, strict=True)
        )
        yield "tags", " ".join(words)

    def joined(
        self, outputs: Outputs, example: np.ndarray, name: str = "tags"
    ) -> np.ndarray:
        """Return an output at each word's first piece: [words].

        It is -1 for words of rows that are not among the examples. outputs: [L] per
        example.
        """
        rows = [*map(np.asarray, outputs[name])]
        classes = np.full(len(self.words.lengths), -1, rows[0].dtype if rows else int)
        for row, r in zip(rows, example, strict=True):
            words = slice(*self.rows[r : r + 2])
            classes[words] = row[self.firsts[words]]
        return classes

    def score(self, outputs: Outputs, example: np.ndarray) -> dict[str, float]:
        """Score the entities and words of complete sentences; NaN if there are none."""
        scores = self._scores(outputs, example)
        return {name: float(scores.get(name, math.nan)) for name in self.form.metrics}

    def parts(self, outputs: Outputs, example: np.ndarray) -> dict[str, Any]:
        """Score each type of entity: {"types": {TYPE: {"precision", ...}}}."""
        scores = self._scores(outputs, example)
        return {key: scores[key] for key in ("types",) if key in scores}

    def _scores(self, outputs: Outputs, example: np.ndarray) -> dict[str, Any]:
        """Score words and, if a metric needs them, entities, overall and by type."""
        classes = self.joined(outputs, example)
        pairs = pairwise(self.sentences.tolist())
        whole = [(a, b) for a, b in pairs if b > a and min(classes[a:b]) >= 0]
        scores: dict[str, Any] = {}
        if {*self.form.metrics} & {*OF_ENTITIES}:
            names = np.array(self.form.labels, object)
            guessed, gold = (
                [names[tags[a:b]].tolist() for a, b in whole]
                for tags in (classes, self.labels)
            )
            scores = metrics.entity_scores(guessed, gold)
        if not whole:
            return {"types": {}} if scores else {}
        words = np.concatenate([np.arange(a, b) for a, b in whole])
        accuracy = metrics.accuracy(classes[words], self.labels[words])
        return {**scores, "accuracy": accuracy}

    def answers(self, outputs: Outputs, read: Sequence[Sentence]) -> Iterator[Any]:
        """Yield {"tokens", "tags", "scores"} for each sentence.

        The scores are the probabilities of the tags.
        """
        classes = self.joined(outputs, np.arange(self.n))
        shares = self.joined(outputs, np.arange(self.n), "probability")
        for sentence, (a, b) in zip(read, pairwise(self.sentences), strict=True):
            yield {
                "tokens": list(sentence.words),
                "tags": [self.form.labels[i] for i in classes[a:b]],
                "scores": shares[a:b].astype(float).tolist(),
            }


def split(sizes: np.ndarray, sentences: np.ndarray, room: int) -> np.ndarray:
    """Split sentences into rows of at most `room` pieces, each as full as possible.

    sizes: pieces of each word, 1 to room; sentences: the first word of each, and the
    end. Returns the first word of each row, and the end: i64 [rows + 1].

    >>> split(np.array([2, 2, 1, 3]), np.array([0, 3, 4]), room=4)
    array([0, 2, 3, 4])
    """
    ends = [0, *np.cumsum(sizes).tolist()]
    rows = [0]
    for begin, end in pairwise(sentences.tolist()):
        while ends[end] - ends[begin] > room:
            begin = bisect_right(ends, ends[begin] + room) - 1
            rows.append(begin)
        rows.append(end)
    return np.array(rows, np.int64)


def find_tags(sentences: Sequence[Sentence], form: Form) -> Form:
    """Return the form with the tags of the training sentences, unless it has some.

    O comes first; the others are sorted by type, with B- before I-. Raises UserError
    for an empty tag, for a single tag, for about as many tags as words, and for tags
    that are not BIO if a metric scores entities.
    """
    asking = form.asking
    if not form.labels:
        for sentence in sentences:
            if "" in sentence.tags:
                place = sentence.place(sentence.tags.index(""))
                raise UserError(f"{place}: the tag is empty")
        tags = dict.fromkeys(tag for s in sentences for tag in s.tags)
        words = sum(len(s.words) for s in sentences)
        if len(tags) < 2:
            raise UserError(f"{asking.label}={form.label}: every word has the same tag")
        summary = f"{asking.label}={form.label}: {len(tags):,} tags of"
        some = join_names([*tags])
        if len(tags) > max(words / 2, 20):
            raise UserError(f"{summary} {words:,} words: {some}")
        known = len({word for s in sentences for word in s.words})
        if len(tags) > max(known, 20):
            why = f"{known:,} different words ({some}): are words and tags swapped?"
            raise UserError(f"{summary} {why}")
        form = form._replace(labels=tuple(sorted(tags, key=_order)))
    wanted = [name for name in form.metrics if name in OF_ENTITIES]
    if wanted and (others := [tag for tag in form.labels if not is_bio(tag)]):
        other = others[0]
        places = (s.place(s.tags.index(other)) for s in sentences if other in s.tags)
        raise UserError(
            f"{next(places, asking.labels)}: the tag {other!r} is none of O, B-TYPE, "
            f"I-TYPE, and {wanted[0]} counts entities: give {asking.metrics}=accuracy"
        )
    return form


def _order(tag: str) -> tuple[bool, str, str]:
    mark, _, kind = tag.partition("-")
    return tag != "O", kind, mark


def is_bio(tag: str) -> bool:
    """Return whether a tag is O, B, I, B-TYPE or I-TYPE."""
    return tag in ("O", "B", "I") or (tag[:2] in ("B-", "I-") and len(tag) > 2)


def make_tags(
    sentences: Sequence[Sentence],
    form: Form,
    tokenizer: Any,
    labelled: bool,
    say: Say = silent,
) -> Tags:
    """Encode the words of sentences as within a running text.

    Reports words without a piece, and tags that violate BIO. Raises UserError for tags
    that are not in the form.
    """
    texts = {word: word for s in sentences for word in s.words}
    if tokenizer.joins_with_space:
        texts |= {word: f" {word}" for word in texts if not word[:1].isspace()}
    known = dict(zip(texts, tokenizer.encode_batch([*texts.values()]), strict=True))
    places = [
        s.place(i) for s in sentences for i, w in enumerate(s.words) if not known[w]
    ]
    tables.report(say, places, "word", " without a piece, taken as unknown")
    known = {word: ids or [tokenizer.unk_id] for word, ids in known.items()}
    pieces = Ragged.of([known[word] for s in sentences for word in s.words])
    sizes = np.array([0, *(len(s.words) for s in sentences)])
    if empty := int((sizes[1:] == 0).sum()):
        say(f"{counted(empty, 'sentence')} without words, kept")
    labels = None
    if labelled:
        tags = ((tag, s.place(i)) for s in sentences for i, tag in enumerate(s.tags))
        labels = form.class_numbers(tags, f"{form.asking.labels}: the tag")
        if all(map(is_bio, form.labels)):
            broken = metrics.bio_violations([s.tags for s in sentences])
            places = [sentences[n].place(i) for n, i in broken]
            note = " I- that continue no entity, and begin one"
            tables.report(say, places, "tag", note)
    begins = np.cumsum(sizes)
    return Tags(form, pieces.counts(tokenizer), pieces, begins, labels=labels)


TASK_TYPE = TaskType(
    read=tag_files.read_sentences,
    parse=tag_files.parse_text,
    parse_lines=tag_files.parse_sentences,
    find_labels=find_tags,
    make_rows=make_tags,
    file_names=tag_files.WANTED,
    metrics=METRICS,
    outputs=("tags", "probability"),
    columns={"text": "1", "label": "-1"},  # the first column and the last
    unused={"text_pair": "", "choices": ""},
    # If the tags of an imported model are not BIO, only words are scored.
    imported=lambda tags: {} if all(map(is_bio, tags)) else {"metrics": "accuracy"},
    text_columns=1,
    head_options=class_option,
    hf_class="ForTokenClassification",
)
