# SPDX-License-Identifier: Apache-2.0
"""What configs of all kinds of retrieval have in common: settings, what is refused."""

from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError, registry
from bertjax.data.corpus.sources import named_sources
from bertjax.models.families import in_effect
from bertjax.tasks.passage_index import read_facts
from bertjax.tasks.task_type import POOLINGS

SHARED = ("negatives", "margin_weight", "chunks")  # settings of all that make vectors


def check_rows(config: ConfigDict) -> None:
    """Refuse what rows of queries and passages have no use for, or cannot be."""
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
    """Refuse chunks that do not part a batch, and a share of margins that is none."""
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
    """Refuse what neither rows nor batches of pairs can be."""
    check_rows(config)
    check_chunks(config)


def read_widths(text: str) -> list[int]:
    """Read task.widths. Raises UserError for what are no numbers of 1 or more, and for
    one that occurs twice."""
    widths = registry.split_list(text)
    if any(not (w.isdecimal() and int(w)) for w in widths):
        raise UserError(f"task.widths={text}: give numbers, as in 32,64")
    found = [*map(int, widths)]
    if twice := [width for width in found if found.count(width) > 1]:
        raise UserError(f"task.widths={text}: {twice[0]} occurs twice")
    return found


def hidden_size(config: ConfigDict) -> int | None:
    """Return how many numbers a vector of the model has, None where it is not said."""
    return in_effect(config.model.to_dict()).get("hidden_size")


def check_widths(config: ConfigDict) -> None:
    """Refuse widths that the model's vectors do not have. UserError."""
    size = hidden_size(config)
    widths = read_widths(config.task.widths)
    if size and (wide := [width for width in widths if width > size]):
        raise UserError(
            f"task.widths: {wide[0]} is more than hidden_size={size}, the width of the "
            "model's vectors"
        )


def head_options(task: ConfigDict, *names: str) -> dict[str, Any]:
    """Return the options that all heads of retrieval have, and others of config.task;
    what has its usual value is left out, so that objectives keep their names."""
    options = {"temperature": task.temperature}
    options |= {name: task[name] for name in names}
    usual = {"margin_weight": 0.0, "chunks": 1}
    return options | {k: task[k] for k, v in usual.items() if task[k] != v}


def pooling_options(task: ConfigDict) -> dict[str, int]:
    """Return the options of heads that make vectors out of hidden states."""
    return {"cls": int(task.pooling == "cls"), "normalize": int(task.normalize)}


def sentence_facts(task: ConfigDict, longest: int) -> dict[str, Any]:
    """Say how texts of so many tokens are made vectors (sentence_transformers.py)."""
    how = {key: task[key] for key in ("pooling", "normalize")}
    return how | {"dot": not task.normalize, "longest": longest}


def check_pooling(config: ConfigDict) -> None:
    """Refuse vectors of questions that an encoder does not make. UserError."""
    known = dict.fromkeys(name for name in POOLINGS if name != "last")
    registry.pick("task.pooling", config.task.pooling, known)
    is_causal = in_effect(config.model.to_dict()).get("is_decoder")
    if is_causal and config.task.pooling == "cls":
        raise UserError(
            "task.pooling=cls: the first token of a causal model sees itself alone, so "
            "that all texts would have one vector; give task.pooling=mean"
        )


def index_facts(config: ConfigDict) -> dict[str, Any]:
    """Say how questions are made vectors, where that is learnt, and what made those of
    the passages that they are compared with."""
    if not config.task.index:
        return {}
    how = sentence_facts(config.task, config.task.question_length + 2)
    known = read_facts(config.task.index, "task.index")
    return {"sentences": how, "index_model": known.get("model", "")}
