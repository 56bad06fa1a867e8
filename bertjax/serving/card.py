# SPDX-License-Identifier: Apache-2.0
"""Write card.json, which describes a served directory for programs without bertjax."""

import json
from pathlib import Path
from typing import Any

import bertjax
from bertjax.assembly.models import LoadedModel
from bertjax.data.tokenizers.export_tokenizer import write_tokenizer
from bertjax.serving.served_model import ServedModel
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.task_type import get_task_type

CARD = "card.json"
FORMAT_VERSION = 1


def describe(model: LoadedModel, served: ServedModel) -> dict[str, Any]:
    """Return the content of a card that is the same in every format.

    It has the task, the names of inputs and outputs, the labels in the order of the
    logits, max_length (tokens of a text, special ones included), the ids of padding and
    blanks, and the prompt that precedes each text. For question answering it also has
    the most pieces of an answer and, if the model knows unanswerable questions, the
    threshold of no answer.
    """
    tokenizer, how = model.tokenizer, served.sentences
    facts: dict[str, Any] = {}
    if served.task == "question-answering":
        facts["answer_length"] = model.config.task.answer_length
        if "threshold" in model.meta["task"]:
            facts["threshold"] = model.meta["task"]["threshold"]
    return facts | {
        "version": FORMAT_VERSION,
        "bertjax": bertjax.__version__,
        "task": served.task,
        "family": model.config.model.family,
        "inputs": [*served.inputs],
        "outputs": [*served.outputs],
        "labels": [*served.labels],
        "max_length": served.longest,
        "pad_id": tokenizer.pad_id,
        "mask_id": tokenizer.mask_id if tokenizer.has_mask else None,
        "prompt": how.prompt if how else "",
    }


def write_card(folder: Path, facts: dict[str, Any]) -> None:
    (folder / CARD).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")


def write_own_tokenizer(folder: Path, model: LoadedModel, served: ServedModel) -> None:
    """Write tokenizer.json and its config, which truncates texts as the model does."""
    between = None
    if "task" in model.meta and not get_task_type(model.config.objective).makes_vectors:
        between = model.meta["task"].get("separators") or tasks.separators(model.config)
    types = "token_type_ids" in served.inputs
    write_tokenizer(model.tokenizer, folder, types, served.longest, between)
