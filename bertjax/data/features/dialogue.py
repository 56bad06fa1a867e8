# SPDX-License-Identifier: Apache-2.0
"""Dialogue: predict an answer from left to right, after the turns before it."""

from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.data.features import base
from bertjax.data.features.base import Batch, GatheredRows, Settings, Spec, Specs
from bertjax.data.features.clm import next_tokens

LEAST = 4  # smallest number of slots of an answer, and of a context
ANSWER = 1  # the token type of the answer, whose tokens are predicted
# Id streams of data.plan=turns that a model may embed (model.id_streams).
IDS = ("role", "turn")


class Limits(NamedTuple):
    """The limits of sequences/turns.py: slots of an answer, slots of a context, and
    predictions of a row."""

    target: int
    context: int
    predictions: int


class DialogueFeatures(base.Features):
    """Rows of turns: the context attends to itself, the answer to the context and to
    its own earlier tokens, and only the answer's tokens are predicted (Bao et al. 2021,
    PLATO-XL, section 3).

    Positions are distances to the answer, so that they do not depend on how many old
    turns fit: the answer has 0, 1, 2, ...; token i of a context of C tokens has
    target + C - i - 1. Roles and turns beyond their tables use the last row.

    An answer of at most 6 slots, 31 98, after turns 17 25 and 46; 2 = cls, 3 = sep:

        input_ids        2 17 25  3 46  3    2 31 98  3
        token_type_ids   0  0  0  0  0  0    1  1  1  1
        role_ids         0  0  0  0  1  1    0  0  0  0
        turn_ids         2  2  2  2  1  1    0  0  0  0
        position_ids    11 10  9  8  7  6    0  1  2  3
        attention_steps  0  0  0  0  0  0    7  8  9 10
        predicted                           31 98  3
    """

    name = "dialogue"
    keys = frozenset({"max_predictions"})

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        config = settings.config
        self.limits = read_limits(config.data, settings.length, settings.max_positions)
        self.tables = {k: n for k, n in settings.tables_of_ids.items() if k in IDS}

    @property
    def predictions(self) -> int:
        return self.limits.predictions

    def specs(self, gathered: Specs) -> dict[str, Spec]:
        row = Spec((self.length,))
        given = {f"{name}_ids" for name in IDS}
        specs = {name: spec for name, spec in gathered.items() if name not in given}
        specs |= dict.fromkeys(["position_ids", "attention_steps"], row)
        specs |= {f"{name}_ids": row for name in self.tables}
        return specs | base.prediction_specs(self.name, self.predictions)

    def make(self, rows: GatheredRows, drawn: list[np.ndarray] | None = None) -> Batch:
        arrays = base.without_marks(rows.arrays)
        ids = {name: arrays.pop(f"{name}_ids") for name in IDS}
        is_answer = arrays["token_type_ids"] == ANSWER
        place, after = self.places(arrays, is_answer)
        columns = np.arange(1, self.length + 1, dtype=np.int32)
        batch = arrays | {
            "position_ids": place,
            "attention_steps": columns * is_answer,
        }
        # The special token that begins a context belongs to no speaker.
        ids["role"] = np.where(after == 0, 0, ids["role"])
        for name, size in self.tables.items():
            batch[f"{name}_ids"] = np.minimum(ids[name], size - 1).astype(np.int32)
        return batch | self.predict(arrays, is_answer)

    def places(
        self, arrays: Batch, is_answer: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each token's position and its place in its sequence, i32 [b, L]."""
        sequence = arrays.get("segment_ids", arrays["attention_mask"])
        width = int(sequence.max(initial=0)) + 1
        number = sequence + np.arange(len(sequence))[:, None] * width
        context = np.bincount(
            number[~is_answer], minlength=len(sequence) * width
        )[number]  # fmt: skip
        columns = np.arange(self.length, dtype=np.int32)
        place = arrays.get("position_ids", np.broadcast_to(columns, sequence.shape))
        away = np.where(
            is_answer, place - context, self.limits.target + context - place - 1
        )
        return (away * (sequence > 0)).astype(np.int32), place

    def predict(self, arrays: Batch, is_answer: np.ndarray) -> Batch:
        """Return the prediction arrays for the answers' tokens, [b, P]."""
        following, same = next_tokens(arrays)
        chosen = is_answer & (same > 0)
        row, column = np.nonzero(chosen)
        slot = (np.cumsum(chosen, axis=1) - 1)[row, column]
        shape = len(chosen), self.predictions
        out = {
            f"{self.name}_positions": np.zeros(shape, np.int32),
            f"{self.name}_ids": np.zeros(shape, np.int32),
            f"{self.name}_weights": np.zeros(shape, np.float32),
        }
        new = column, following[row, column], 1.0
        for values, value in zip(out.values(), new, strict=True):
            values[row, slot] = value
        return out

    def describe(self) -> str:
        return f"answers of at most {self.limits.target} slots predicted"

    def count(self, before: Batch, after: Batch) -> dict[str, float]:
        return {"predicted": int((after[f"{self.name}_weights"] > 0).sum())}

    def predicted(self, batch: Batch) -> np.ndarray:
        return base.mark_predictions(batch, self.name, ahead=1)


def read_limits(data: Any, length: int, positions: int) -> Limits:
    """Return the slots of answers and contexts, and the predictions of a row.

    An answer has data.target_length slots. The default is an eighth of the row, or 32
    if that is more, but then at most half of the row. A context has as many slots as
    there are positions beyond an answer's, at most `length`. A packed row predicts
    data.max_predictions tokens; the default is three eighths of its length. Raises
    UserError.
    """
    target = data.target_length or max(length // 8, min(32, length // 2))
    most = min(length, positions) - LEAST
    if not LEAST <= target <= most:
        raise UserError(
            f"data.target_length={target} must be from {LEAST} to {most}: a context "
            f"needs {LEAST} more of data.length={length} and of the model's "
            f"{positions} positions"
        )
    context = min(length, positions - target)
    if not data.packed:
        if data.max_predictions is not None:
            raise UserError(
                f"data.max_predictions={data.max_predictions} needs packed rows: "
                "give data.target_length, or data.packed=True"
            )
        return Limits(target, context, target - 1)
    predictions = data.max_predictions or max(target - 1, -(-3 * length // 8))
    if predictions < target - 1:
        raise UserError(
            f"data.max_predictions={predictions} is less than an answer has, "
            f"data.target_length={target} less 1"
        )
    return Limits(target, context, predictions)


make_features = DialogueFeatures
