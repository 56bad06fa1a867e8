# SPDX-License-Identifier: Apache-2.0
"""Conversations as prompts: rows like those of training, up to the model's turn."""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from bertjax import UserError, objectives
from bertjax.assembly import resolve
from bertjax.assembly.models import LoadedModel
from bertjax.data.corpus.aligned_records import (
    SPEAKER,
    TURNS,
    make_document,
    read_value,
)
from bertjax.data.corpus.documents import Fields
from bertjax.data.features.base import GatheredRows
from bertjax.data.sequences.make_plan import make_plan
from bertjax.data.sequences.turns import Limits
from bertjax.generation.options import reading_prompt

Arrays = dict[str, np.ndarray]  # arrays of a row's tokens, i32 [n] each
NAME = "dialogue"  # the name of the objective
NOBODY = "\0"  # a speaker who has not spoken


def answers(opened: LoadedModel) -> bool:
    """Return whether a model was trained to answer conversations."""
    parts = objectives.parse(opened.config.objective)
    return any(part.name == NAME for part in parts)


class Conversations:
    """Converts conversations to a model's rows.

    target: the most slots of an answer; length: the slots of a row.
    """

    def __init__(self, opened: LoadedModel) -> None:
        config = opened.config.copy_and_resolve_references()
        if config.data.streams:
            raise UserError(
                f"this model reads data.streams={config.data.streams} of its text, "
                "which prompts do not have: it can be evaluated, but writes no answers"
            )
        config.data.packed, config.data.max_predictions = False, None
        self.tokenizer, self.field = opened.tokenizer, config.data.text_field
        self.length = config.data.length
        how = self.tokenizer, None, self.length, None
        needs = frozenset({NAME})
        self.features = resolve.make_features(config, needs, *how)
        self.target, context, predictions = self.features.limits
        # There must be room for the longest answer after a context.
        context = min(context, self.length - self.target)
        self.limits = Limits(self.target, context, predictions)

    def lay_out(self, prompts: Sequence[str | Mapping[str, Any]]) -> list[Arrays]:
        """Return the arrays of each prompt's row; its last token is the answer's first.

        A prompt is an object with `turns`, as in records of the training text, and
        optionally `knowledge` and `speaker`, who answers. By default this is the most
        recent speaker other than the speaker of the last turn. A prompt that is a text
        is a conversation of one turn. Raises PromptError for anything else, if a
        speaker is given and no turn has one, if no turn has text, and if the last turn
        does not fit.
        """
        arrays = []
        for number, prompt in enumerate(prompts):
            with reading_prompt(number):
                arrays.append(self.lay_out_one(prompt))
        return arrays

    def lay_out_one(self, prompt: str | Mapping[str, Any]) -> Arrays:
        """Return the arrays of one prompt; see `lay_out`."""
        name = f"the prompt {str(prompt)[:60]!r}"
        record = {TURNS: [{"text": prompt}]} if isinstance(prompt, str) else prompt
        found = turns_of(record, self.field, name)
        fields = Fields(layout=TURNS)
        document = make_document(found, fields, lambda: name, Counter())
        ids = [self.tokenizer.encode(text) for text in document.paragraphs]
        speakers = [values[SPEAKER] for values in document.values or ()]
        *before, (_, who) = zip(ids, speakers, strict=True)
        # A single token stands for the answer that is to be generated.
        kept = [(own, number) for own, number in before if own]
        own = [*(own for own, _ in kept), [self.tokenizer.unk_id]]
        numbers = np.array([*(number for _, number in kept), who])
        store = SimpleNamespace(
            tokens=np.concatenate(own),
            sentences=np.cumsum([0, *map(len, own)]),
            documents=np.array([0, len(own)]),
            streams={SPEAKER: ("sentence", numbers)},
        )
        try:
            plan = make_plan(store, TURNS, self.length, 0, limits=self.limits)
        except UserError:
            plan = None
        if plan is None or plan.stops[-1] != len(own):
            raise UserError(
                f"{name}: there is no turn, or the last turn does not fit into the "
                f"{self.limits.context} tokens of the context beside the knowledge"
            )
        return self.make_row(plan)

    def make_row(self, plan: Any) -> Arrays:
        """Return the row of a plan's last answer, cut before the answer's tokens."""
        last, zero = np.array([plan.n - 1]), np.zeros(1, np.int64)
        rows = plan.gather(last, zero.astype(np.uint64), self.tokenizer)
        gathered = GatheredRows(rows, zero.astype(np.uint64), zero, zero)
        batch = self.features.make(gathered)
        size = int(batch["attention_mask"].sum()) - 2  # without the token and its [SEP]
        shape = rows["input_ids"].shape
        named = (n for n in batch if n != "attention_mask" and batch[n].shape == shape)
        return {name: batch[name][0, :size].astype(np.int32) for name in named}


def turns_of(record: Mapping[str, Any], field: str, name: str) -> dict[str, Any]:
    """Return a conversation as a record, with the answer as an additional last turn.

    field: the field of a turn's text in training. Raises UserError for an invalid
    conversation.
    """
    turns = record.get(TURNS)
    if not isinstance(turns, list) or not all(isinstance(t, Mapping) for t in turns):
        raise UserError(
            f'{name} is not a conversation: give {{"turns": [{{"speaker": ..., "text": '
            "...}, ...]}"
        )
    *names, who = (
        read_value(one.get(SPEAKER), SPEAKER, lambda: name) for one in (*turns, record)
    )
    own = [
        {"text": turn.get(field, turn.get("text")), SPEAKER: one}
        for turn, one in zip(turns, names, strict=True)
    ]
    if not any(names):
        if who is not None:
            raise UserError(
                f"{name}: speaker={who} is to answer, and no turn says whose it is: "
                "give each its speaker, or leave this one out"
            )
    elif who is None:
        others = (one for one in reversed(names) if one != names[-1])
        who = next(others, NOBODY)
    known = {"knowledge": record["knowledge"]} if record.get("knowledge") else {}
    return {TURNS: [*own, {"text": "?", SPEAKER: who}], **known}
