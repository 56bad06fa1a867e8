# SPDX-License-Identifier: Apache-2.0
"""Question answering from an index of passages.

An embedding model finds passages, and returns these. A reader (objective=read or rag)
answers from the passages that were found.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from bertjax import UserError
from bertjax.assembly import models
from bertjax.config import cli
from bertjax.inference import embed_index, embed_texts
from bertjax.inference.predict_rows import answer, open_finetuned
from bertjax.tasks import prepare_task, tables
from bertjax.tasks.open_questions import id_of
from bertjax.tasks.passage_index import PassageIndex
from bertjax.tasks.task_type import find_task_type

__all__ = ["answer_from_index", "find_passages"]

FOUND = 20  # passages per question that an embedding model returns by default
READERS = ("read", "rag")  # objectives whose models answer from passages


def answer_from_index(
    args: Any,
    where: str,
    questions: Sequence[dict[str, Any]],
    index: PassageIndex,
    writes: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield a model's answer to each question, in order.

    An embedding model returns the question with `ctxs`, the passages that it finds.
    args: retriever, passages, batch_size, dtype, weights; for a model that writes texts
    also num_beams and length_penalty, if given. writes: whether the model must be one
    that writes texts. Raises UserError for other models, before anything is searched.
    """
    names = [id_of(row, i) for i, row in enumerate(questions)]
    pairs = zip(names, questions, strict=True)
    empty = [name for name, row in pairs if not row["question"].strip()]
    tables.report(cli.say, empty, "empty question", ", kept")
    opened = models.open_model(where, "--model")
    objective = opened.config.objective
    kind = find_task_type(objective) if "task" in opened.meta else None
    if writes and not (kind and kind.generates):
        raise UserError(
            f"--index: --model={where} has objective={objective}, which writes no "
            f"texts: bertjax.predict --index={args.index} says what it finds or answers"
        )
    if kind is None or kind.makes_vectors:
        if args.retriever:
            raise UserError(f"--retriever: --model={where} finds passages itself")
        k = args.passages or FOUND
        found = find_passages(args, where, "--model", questions, index, k)
        each = zip(questions, found, strict=True)
        return ({**row, "ctxs": passages} for row, passages in each)
    if objective.partition(":")[0] not in READERS:
        raise UserError(
            f"--index: --model={where} has objective={objective}, and answers out of "
            f"an index are of objective={' or '.join(READERS)}"
        )
    model = open_finetuned(where, args.dtype, args.weights, opened=opened)
    trains = bool(model.form.index)  # whether its question encoder was trained
    if not trains and not args.retriever:
        raise UserError(
            f"--model={where} reads what another model finds: give --retriever=DIR, "
            "the model of the index"
        )
    config = model.config
    # A model that writes gets the passages found here, although in training its steps
    # searched themselves.
    config.task.index = args.index if trains and not kind.generates else ""
    if config.task.index and args.retriever:
        # Whoever searches, the reader compares its own question vectors with the index.
        known = embed_texts.digest_of(model.params), opened.meta.get("index_model", "")
        index.check_model(known, f"--model={where}", cli.say)
    prepare_task.settle(config)
    for name in ("num_beams", "length_penalty"):
        if getattr(args, name, None) is not None:
            config.task[name] = getattr(args, name)
    key = "passages" if kind.generates else "candidates"
    k = config.task[key] = args.passages or config.task[key]
    form = prepare_task.saved_form(config, opened.meta)
    path, flag = where, "--model"
    if args.retriever:
        path, flag = args.retriever, "--retriever"
    found = find_passages(args, path, flag, questions, index, k)
    asking, listed = form.columns[:2]
    rows = [
        {"id": name, asking: row["question"], listed: passages}
        for name, row, passages in zip(names, questions, found, strict=True)
    ]
    read = prepare_task.parse_objects(config, form, rows, "questions")
    answers = answer(model._replace(form=form), read, args.batch_size)
    both = zip(questions, answers, strict=True)
    return ({"question": row["question"], **one} for row, one in both)


def find_passages(
    args: Any,
    path: str,
    flag: str,
    questions: Sequence[dict[str, Any]],
    index: PassageIndex,
    k: int,
) -> list[list[dict[str, Any]]]:
    """Return k passages for each question, found by the model at `path` (a flag's)."""
    finder = embed_index.open_retriever(path, flag, args.dtype, args.weights)
    # A reader has its own question vectors; its passage vectors are those of the index
    # model that it began with, or its own too.
    known = finder.digest, finder.meta.get("index_model", "")
    index.check_model(known, f"{flag}={path}", cli.say)
    texts = [row["question"] for row in questions]
    return embed_index.find(finder, index, texts, k, args.batch_size)
