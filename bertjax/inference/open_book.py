# SPDX-License-Identifier: Apache-2.0
"""Questions answered out of an index: found, then read.

A model of vectors finds passages, and says these; one that reads (objective=read)
answers from them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from bertjax import UserError
from bertjax.assembly import models
from bertjax.inference import embed_index
from bertjax.inference.predict_rows import answer, open_finetuned
from bertjax.tasks import prepare_task
from bertjax.tasks.passage_index import PassageIndex
from bertjax.tasks.task_type import find_task_type

FOUND = 20  # passages of a question that a model of vectors names


def answer_from_index(
    args: Any, where: str, questions: Sequence[dict[str, Any]], index: PassageIndex
) -> Iterator[dict[str, Any]]:
    """Yield what a model says of each question, in order.

    Of a model of vectors: the question, with `ctxs`, its passages. Raises UserError for
    one of another kind.
    """
    opened = models.open_model(where, "--model")
    kind = find_task_type(opened.config.objective) if "task" in opened.meta else None
    options = args.dtype, args.weights
    if kind is None or kind.makes_vectors:
        if args.retriever:
            raise UserError(f"--retriever: --model={where} finds passages itself")
        finder = embed_index.open_retriever(where, "--model", *options)
        k = args.passages or FOUND
        texts = [row["question"] for row in questions]
        found = embed_index.find(finder, index, texts, k, args.batch_size)
        pairs = zip(questions, found, strict=True)
        return ({**row, "ctxs": passages} for row, passages in pairs)
    model = open_finetuned(where, *options, opened=opened)
    if model.config.objective.partition(":")[0] != "read":
        raise UserError(
            f"--index: --model={where} has objective={model.config.objective}, and "
            "answers out of an index are of objective=read, or found by a retriever"
        )
    own = bool(model.form.index)  # whether its vectors of questions were learnt
    if not own and not args.retriever:
        raise UserError(
            f"--model={where} reads what another model finds: give --retriever=DIR, "
            "the model of the index"
        )
    path, flag = (
        (args.retriever, "--retriever") if args.retriever else (where, "--model")
    )
    finder = embed_index.open_retriever(path, flag, *options)
    k = args.passages or model.form.candidates
    model.config.task.index = args.index if own else ""
    form = prepare_task.saved_form(model.config, opened.meta)
    form = form._replace(passages=k)
    asking, listed = form.columns[:2]
    texts = [row["question"] for row in questions]
    found = embed_index.find(finder, index, texts, k, args.batch_size)
    rows = [
        {"id": str(row.get("id", i)), asking: row["question"], listed: passages}
        for i, (row, passages) in enumerate(zip(questions, found, strict=True))
    ]
    read = prepare_task.parse_objects(model.config, form, rows, "questions")
    answers = answer(model._replace(form=form), read, args.batch_size)
    pairs = zip(questions, answers, strict=True)
    return ({"question": row["question"], **one} for row, one in pairs)
