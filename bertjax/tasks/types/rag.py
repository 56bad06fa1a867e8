# SPDX-License-Identifier: Apache-2.0
"""Rows of questions with passages and a text to generate (RAG).

The input is JSON lines as for objective=read (types/read.py): `question`, `answers`, of
which an epoch trains on one, and `ctxs`. The question with each passage is a row of two
texts and a target, as in objective=seq2seq (types/seq2seq.py). With task.index the rows
have no passages: each step finds them in tables made from the index.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, registry
from bertjax.tasks import tables
from bertjax.tasks.marginal_rows import AugmentedRows, MarginalRows, SearchingRows
from bertjax.tasks.open_questions import (
    answers_of,
    parse_found,
    passages_of,
    read_found,
)
from bertjax.tasks.passage_index import Passage, PassageIndex, digest_of
from bertjax.tasks.retrieval_options import (
    check_pooling,
    check_vectors,
    index_facts,
    pooling_options,
)
from bertjax.tasks.tables import Row, Say, silent
from bertjax.tasks.task_rows import Form, Ragged
from bertjax.tasks.task_type import TaskType
from bertjax.tasks.types import seq2seq
from bertjax.tasks.types.read import WANTED

KEY = "task.index"
METRICS = "perplexity", "exact", "f1"
COLUMN = "passage"  # in the rows made of a question with each passage


def make_rows(
    read: Sequence[Row], form: Form, tokenizer: Any, labelled: bool, say: Say = silent
) -> MarginalRows:
    """Encode questions with passages and, if labeled, answers.

    Labeled questions without a passage are left out and reported. Raises UserError,
    naming the place, for invalid cells.
    """
    if form.index:
        return make_searching_rows(read, form, tokenizer, labelled, say)
    asking, listed = form.columns[:2]
    found = [passages_of(row, listed) for row in read]
    k = form.passages
    if not labelled:
        k = min(k, max(map(len, found), default=0))
    if not k or not any(found):
        raise UserError(f"{read[0].place}: no question has a passage ({listed})")
    if labelled:
        bare = [row.place for row, own in zip(read, found, strict=True) if not own]
        tables.report(say, bare, "question", " without a passage, left out")
        read = [row for row, own in zip(read, found, strict=True) if own]
        found = [own for own in found if own]
    rows, scores = [], np.zeros((len(read), k), np.float32)
    is_passage = np.zeros((len(read), k), bool)
    for i, (row, passages) in enumerate(zip(read, found, strict=True)):
        cells = {asking: row.cells[asking]}
        if labelled:
            cells[form.label] = answers_of(row, form.label)
        for slot in range(k):
            text = "-"  # stands for a missing passage, whose weight is 0
            if slot < len(passages):
                one = passages[slot]
                text = Passage("", one["title"], one["text"]).whole
                scores[i, slot], is_passage[i, slot] = one["score"], True
            rows.append(Row({**cells, COLUMN: text}, row.place))
    own = form._replace(columns=(asking, COLUMN), metrics=("perplexity",))
    inner = seq2seq.make_sequences(rows, own, tokenizer, labelled, say)
    answered = [passages[:k] for passages in found]
    more = () if labelled else answered
    return AugmentedRows(form, inner.counts, inner, scores, is_passage, more)


def make_searching_rows(
    read: Sequence[Row], form: Form, tokenizer: Any, labelled: bool, say: Say
) -> SearchingRows:
    """Encode questions, answers, and the passages of the index. Raises UserError."""
    asking = form.columns[0]
    index, texts = _tokenized(form.index, digest_of(form.index, KEY), tokenizer)
    if form.passages > len(index.passages):
        raise UserError(
            f"task.passages={form.passages} is more than task.index={form.index} has: "
            f"{len(index.passages)}"
        )
    rows = [
        Row({asking: r.cells[asking]} | _answers(r, form, labelled), r.place)
        for r in read
    ]
    own = form._replace(columns=(asking,), metrics=("perplexity",))
    inner = seq2seq.make_sequences(rows, own, tokenizer, labelled, say)
    return SearchingRows(
        form,
        inner.counts + texts.counts(tokenizer),
        inner,
        index.passages,
        texts,
        index.vectors,
        index.digest,
    )


@lru_cache(maxsize=1)
def _tokenized(path: str, digest: str, tokenizer: Any) -> tuple[PassageIndex, Ragged]:
    """Open an index and encode its passages, once for all sets of rows.

    digest: the current digest of the index, a key of the cache. Raises UserError.
    """
    index = PassageIndex(path, KEY)
    return index, Ragged.encode(tokenizer, [p.whole for p in index.passages])


def _answers(row: Row, form: Form, labelled: bool) -> dict[str, Any]:
    return {form.label: answers_of(row, form.label)} if labelled else {}


def _check(config: ConfigDict) -> None:
    task = config.task
    marginals = dict.fromkeys(("sequence", "token"))
    registry.pick("task.marginal", task.marginal, marginals)
    if task.index:
        check_pooling(config)
        check_vectors(config)
        if task.text_pair:
            raise UserError(
                f"task.text_pair={task.text_pair} names passages of rows, and "
                "task.index has those that are found: leave one of the two out"
            )
    elif not task.text_pair:
        raise UserError("task.text_pair is empty: name the column of the passages")


def _head_options(task: ConfigDict, labels: Any) -> dict[str, Any]:
    names = "target_length", "passages", "marginal", "temperature"
    own = {name: task[name] for name in names}
    if task.index:
        own |= pooling_options(task)
    return own


TASK_TYPE = TaskType(
    read=read_found,
    parse=parse_found,
    make_rows=make_rows,
    file_names=WANTED,
    metrics=METRICS,
    default_metrics=METRICS,
    outputs=("nats",),
    label_key="target",
    columns={"text": "question", "text_pair": "ctxs", "target": "answers"},
    unused={"label": "", "labels": "", "choices": ""},
    settings=(
        *("target", "target_length", "num_beams", "length_penalty"),
        *("passages", "marginal", "temperature"),
        *("index", "question_length", "pooling", "normalize"),
    ),
    needs=dict.fromkeys(("question_length", "pooling", "normalize"), "index"),
    instead={"text_pair": "index"},
    check=_check,
    head_options=_head_options,
    generates=True,
    facts=index_facts,
)
