# SPDX-License-Identifier: Apache-2.0
"""Settings and checks that the configs of all kinds of retrieval share."""

from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError, registry
from bertjax.data.corpus.sources import named_sources
from bertjax.models.families import in_effect
from bertjax.tasks.passage_index import read_facts
from bertjax.tasks.task_type import POOLINGS

SHARED = ("negatives", "margin_weight", "chunks")  # settings of types that make vectors


def check_rows(config: ConfigDict) -> None:
    """Raise UserError for settings that rows of queries and passages do not support."""
    if not config.task.text_pair:
        raise UserError("task.text_pair is empty: name the column of the passage")
    if config.eval.examples:
        raise UserError(
            f"eval.examples={config.eval.examples} has no effect with objective="
            f"{config.objective}, whose evaluation searches all passages: give "
            "eval.examples=0"
        )
    if len(named_sources(config.data.train, "data.train")) > 1:
        raise UserError(
            f"data.train={config.data.train} is a mixture, and passages are learnt "
            "from one source alone"
        )


def check_chunks(config: ConfigDict) -> None:
    """Raise UserError if chunks do not divide the batch, or margin_weight is not in
    [0, 1]."""
    chunks = config.task.chunks
    if chunks < 1 or config.batch_size % chunks:
        raise UserError(
            f"task.chunks={chunks} has to divide batch_size={config.batch_size}"
        )
    if not 0 <= config.task.margin_weight <= 1:
        raise UserError(
            f"task.margin_weight={config.task.margin_weight} must be from 0 to 1"
        )


def check_pairs(config: ConfigDict) -> None:
    """Check the rows and batches of pairs: `check_rows` and `check_chunks`."""
    check_rows(config)
    check_chunks(config)


def read_widths(text: str) -> list[int]:
    """Parse task.widths. Raises UserError if they are not distinct positive numbers."""
    widths = registry.split_list(text)
    if any(not (w.isdecimal() and int(w)) for w in widths):
        raise UserError(f"task.widths={text}: give numbers, as in 32,64")
    found = [*map(int, widths)]
    if twice := [width for width in found if found.count(width) > 1]:
        raise UserError(f"task.widths={text}: {twice[0]} occurs twice")
    return found


def hidden_size(config: ConfigDict) -> int | None:
    """Return the width of the model's vectors, None if not known."""
    return in_effect(config.model.to_dict()).get("hidden_size")


def check_vectors(config: ConfigDict) -> None:
    """Raise UserError if the vectors of task.index are made in another way than the
    queries'."""
    task = config.task
    facts = read_facts(task.index, "task.index")
    how = facts["how"]
    # Unless vectors are compared by inner products, those of an index are normalized.
    own = {"normalize": how.get("normalize", False) or not how.get("dot", False)}
    own |= {"width": facts.get("width"), "pooling": how.get("pooling")}
    wanted = {"width": hidden_size(config)}
    wanted |= {"pooling": task.pooling, "normalize": task.normalize}
    for name, value in wanted.items():
        if None not in (own[name], value) and own[name] != value:
            same = "" if name == "width" else f"give task.{name}={own[name]}, or "
            raise UserError(
                f"task.index={task.index} has vectors of {name}={own[name]}, and those "
                f"of questions have {name}={value}: {same}make it by the model that "
                "init_from names (bertjax.embed --index)"
            )


def check_widths(config: ConfigDict) -> None:
    """Raise UserError for widths greater than that of the model's vectors."""
    size = hidden_size(config)
    widths = read_widths(config.task.widths)
    if size and (wide := [width for width in widths if width > size]):
        raise UserError(
            f"task.widths: {wide[0]} is more than hidden_size={size}, the width of the "
            "model's vectors"
        )


def head_options(task: ConfigDict, *names: str) -> dict[str, Any]:
    """Return the options that all retrieval heads have, and further ones by name.

    margin_weight and chunks are left out if they have their default values, so that the
    names of objectives do not change.
    """
    options = {"temperature": task.temperature}
    options |= {name: task[name] for name in names}
    usual = {"margin_weight": 0.0, "chunks": 1}
    return options | {k: task[k] for k, v in usual.items() if task[k] != v}


def pooling_options(task: ConfigDict) -> dict[str, int]:
    """Return the options of heads that pool hidden states to vectors."""
    return {"cls": int(task.pooling == "cls"), "normalize": int(task.normalize)}


def sentence_facts(task: ConfigDict, longest: int) -> dict[str, Any]:
    """Return how to make vectors of texts (sentence_transformers.py).

    longest: the most tokens of a text.
    """
    how = {key: task[key] for key in ("pooling", "normalize")}
    return how | {"dot": not task.normalize, "longest": longest}


def check_pooling(config: ConfigDict) -> None:
    """Raise UserError for a pooling that the questions' encoder does not support."""
    known = dict.fromkeys(name for name in POOLINGS if name != "last")
    registry.pick("task.pooling", config.task.pooling, known)
    is_causal = in_effect(config.model.to_dict()).get("is_decoder")
    if is_causal and config.task.pooling == "cls":
        raise UserError(
            "task.pooling=cls: the first token of a causal model sees itself alone, so "
            "that all texts would have one vector; give task.pooling=mean"
        )


def index_facts(config: ConfigDict) -> dict[str, Any]:
    """Return how to make vectors of questions, and which model made the passages'.

    Without task.index the encoder is not trained to make vectors: {}.
    """
    if not config.task.index:
        return {}
    how = sentence_facts(config.task, config.task.question_length + 2)
    known = read_facts(config.task.index, "task.index")
    return {"sentences": how, "index_model": known.get("model", "")}
