# SPDX-License-Identifier: Apache-2.0
"""Words and spans of sentences that have a label each, and where they lie in rows.

What of edge probing (Tenney et al. 2019, What do you learn from context?) stands before
the probe: a labelled span, or two of them, make a vector; a word is a span of one. Its
pieces are averaged, where they learn a pooling.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.tasks import metrics, tag_files
from bertjax.tasks.task_rows import Form
from bertjax.tasks.types import tag

ASKING = tag.Asking("--tag", "--labels", "--metric")
POOLINGS = dict.fromkeys(("mean", "first"))  # of a span's pieces

Say = Callable[[str], None]


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


def read_words(
    values: Mapping[str, str],
    columns: Mapping[str, str],
    form: Form,
    tokenizer: Any,
    most: int,
    seed: int,
    say: Say,
) -> list[Spans]:
    """Read tagged sentences, each of whose words is an example.

    values: {flag: files}, of the training sentences and then of others. columns: {flag:
    column}, of the words and of the tags. most: words of each, see `choose`. Raises
    UserError.
    """
    parts = []
    for flag, value in values.items():
        sentences = tag_files.read_sentences(value, flag, columns, say)
        form = tag.find_tags(sentences, form, ASKING)  # the training sentences'
        taken = choose([len(s.words) for s in sentences], most, seed, flag, say)
        some = [sentences[i] for i in taken]
        words = tag.make_tags(some, form, tokenizer, True, say, ASKING)
        at = np.arange(len(words.labels))
        parts.append(Spans(words, np.stack([at, at + 1], 1)[:, None], words.labels))
    return parts


def choose(sizes: list[int], most: int, seed: int, flag: str, say: Say) -> np.ndarray:
    """Choose whole sentences of at most `most` examples together: indices, rising.

    sizes: examples of each. They are drawn by the seed; says how many are left out, and
    raises UserError where all are.
    """
    order = np.argsort(counter_rng.fold(seed, "choose", np.arange(len(sizes))))
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
