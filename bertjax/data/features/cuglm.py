# SPDX-License-Identifier: Apache-2.0
"""CugLM: names of code are masked in one copy of a row; another copy is read from left
to right (Liu et al. 2020, ASE, doi 10.1145/3324884.3416591, section 3)."""

from typing import NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.data.features import base
from bertjax.data.features.base import (
    Batch,
    GatheredRows,
    Settings,
    Spec,
    Specs,
)
from bertjax.data.features.clm import next_tokens
from bertjax.data.masking import choose, mask_rates
from bertjax.data.masking.mask_rates import MaskRate

RATE = MaskRate(0.15, 0.15)
MOST = 30  # largest number of masked tokens in a row
STREAM = "type"
TYPES = f"{STREAM}_ids"  # 0: the token is not part of a name


class CuglmFeatures(base.Features):
    """A row of L slots: a masked copy of the text in the first R = L / 2, a clean copy
    in the others. The copies are separate sequences and do not attend to each other.

    In the masked copy, names (neighboring tokens of one type) are drawn uniformly, as
    many as fit into min(30, max(1, round(0.15 n))) of n tokens, and all of their tokens
    become masks. Tokens attend to the whole copy, or with `causal` to earlier tokens.
    The masked token, `mlm_ids`, and its type, `mlm_types`, are predicted; `mlm_names`
    numbers the masked names of a row from 1. In the clean copy each token attends to
    itself and earlier tokens and predicts the next one, `lm_ids`, unless that is
    special; `lm_names` is the number of the name that the next token is part of, 0 for
    none. Both copies of a token have its position and token type.

    R = 6, room for two masked tokens, 4 = mask, name 17 25 of type 7, name 46 of type
    2:

                         masked copy           clean copy
        gathered         2 17 25 31 46  3
        type_ids         0  7  7  0  2  0
        input_ids        2  4  4 31 46  3      2 17 25 31 46  3
        segment_ids      1  1  1  1  1  1      2  2  2  2  2  2
        attention_steps  0  0  0  0  0  0      1  2  3  4  5  6
        position_ids     0  1  2  3  4  5      0  1  2  3  4  5
        mlm_positions       1  2
        mlm_ids            17 25
        mlm_types           7  7
        mlm_names           1  1
        lm_positions                           6  7  8  9 10 11
        lm_ids                                17 25 31 46  3  0
        lm_weights                             1  1  1  1  0  0
        lm_names                               1  1  0  2  0  0

    data.paper_compat: names are taken in reading order, as in the released code.
    """

    keys = frozenset({"mask_rate", "max_predictions", "paper_compat"})

    def __init__(self, settings: Settings, causal: bool = False) -> None:
        if settings.length < 4:
            raise UserError(
                "objective: cuglm has two copies of a text: data.length >= 4"
            )
        super().__init__(settings)
        base.check_mask(settings)
        data = settings.config.data
        if STREAM in settings.streams:
            raise UserError(
                f"model.id_streams: objective={settings.config.objective} predicts the "
                f"types of names, so the model must not read them: leave {STREAM} out"
            )
        self.streams = settings.streams | {STREAM}
        self.causal, self.tables = causal, settings.tables
        self.in_order = bool(data.paper_compat)
        self.text = self.length // 2
        self.rate = mask_rates.read(settings.mask_rate) or RATE
        self.most = data.max_predictions or MOST
        rates = [mask_rates.read(rate) or RATE for rate in settings.rates]
        highest = np.full(1, max(map(max, rates)))
        self.predictions = int(self._budget(highest, np.full(1, self.text))[0])
        self.special = base.special_pieces(self.tokenizer)
        self.special[self.tokenizer.unk_id] = False

    @property
    def raw(self) -> int:
        return self.text

    def specs(self, gathered: Specs) -> dict[str, Spec]:
        row, names = Spec((self.length,)), Spec((self.predictions,))
        specs = {k: v for k, v in gathered.items() if k not in (*self.per_token, TYPES)}
        own = [name for name in self.per_token if name in gathered]
        own += ["segment_ids", "position_ids", "attention_steps"]
        specs |= dict.fromkeys(own, row)
        specs |= base.prediction_specs("mlm", self.predictions)
        specs |= {"mlm_types": names, "mlm_names": names}
        specs |= base.prediction_specs("lm", self.text)
        return specs | {"lm_names": Spec((self.text,)), "text_tokens": Spec(())}

    def make(self, rows: GatheredRows, drawn: list[np.ndarray] | None = None) -> Batch:
        arrays = base.without_marks(rows.arrays)
        ids, real = arrays["input_ids"], arrays["attention_mask"]
        types = arrays.pop(TYPES)
        names = self._names(ids, real, types)
        chosen, sizes = self._choose(rows, names)
        if drawn is not None:
            drawn.append(sizes)
        batch = self._copies(arrays)
        used = chosen.column < self.text
        row, slot = np.nonzero(used)
        column = chosen.column[row, slot]
        batch["input_ids"][row, column] = self.tokenizer.mask_id
        number = np.cumsum(np.diff(chosen.word, axis=1, prepend=-1) != 0, axis=1)
        values = {"positions": column, "ids": ids[row, column]}
        values |= {"types": types[row, column], "names": number[row, slot]}
        for name, value in {**values, "weights": 1}.items():
            kind = np.float32 if name == "weights" else np.int32
            out = np.zeros((len(ids), self.predictions), kind)
            out[row, slot] = value
            batch[f"mlm_{name}"] = out
        return batch | self._next(arrays, names.number)

    def _next(self, arrays: Batch, number: np.ndarray) -> Batch:
        """Return the predictions of the clean copy, [b, R]."""
        following, same = next_tokens(arrays)
        same *= ~self.special[following]
        after = np.pad(number[:, 1:], ((0, 0), (0, 1)))
        places = np.arange(self.text, 2 * self.text, dtype=np.int32)
        return {
            "lm_positions": np.broadcast_to(places, following.shape).copy(),
            "lm_ids": following,
            "lm_weights": same,
            "lm_names": (after * (same > 0)).astype(np.int32),
            "text_tokens": arrays["attention_mask"].sum(axis=1).astype(np.int32),
        }

    def _copies(self, arrays: Batch) -> Batch:
        """Return the arrays of a batch with both copies, before masking."""
        ids, real, R = arrays["input_ids"], arrays["attention_mask"], self.text
        places = np.arange(R, dtype=np.int32)
        own = {name: arrays[name] for name in self.per_token if name in arrays}
        own.setdefault("position_ids", np.broadcast_to(places, ids.shape))
        first = own.setdefault("segment_ids", real)
        # Number the sequences of the clean copy after those of the masked copy.
        sequences = arrays.get("cls_positions", np.zeros((1, 1))).shape[1]
        second = (first + sequences) * real
        batch = {k: v for k, v in arrays.items() if k not in self.per_token}
        for name, values in own.items():
            out = batch[name] = np.zeros((len(ids), self.length), values.dtype)
            out[:, :R] = values
            out[:, R : 2 * R] = second if name == "segment_ids" else values
        batch["input_ids"][:, 2 * R :] = self.tokenizer.pad_id
        steps = batch["attention_steps"] = np.zeros_like(batch["input_ids"])
        steps[:, R : 2 * R] = (places + 1) * real
        if self.causal:
            steps[:, :R] = steps[:, R : 2 * R]
        return batch

    def _names(self, ids: np.ndarray, real: np.ndarray, types: np.ndarray) -> "_Names":
        free = choose.is_text(choose.Rows(ids, real, np.zeros(len(ids))), self.tables)
        free |= (ids == self.tables.unk_id) & (real > 0)
        free &= types != 0
        begins = free.copy()
        begins[:, 1:] &= (types[:, 1:] != types[:, :-1]) | ~free[:, :-1]
        return _Names(free, begins, np.cumsum(begins, axis=1) * free)

    def _choose(
        self, rows: GatheredRows, names: "_Names"
    ) -> tuple[choose.Chosen, np.ndarray]:
        """Choose whole names; also return the number of tokens of each."""
        shape = names.free.shape
        count = rows.arrays["attention_mask"].sum(axis=1)
        rate = np.full(1, self.rate.at(rows.progress))
        budget = np.minimum(self._budget(rate, count), self.predictions)
        if self.in_order:
            order = np.broadcast_to(np.arange(self.text, dtype=np.uint64), shape)
        else:
            order = choose.draw_noise(rows.keys, self.text)
        units = choose.find_units(names.free, names.begins)
        taken = choose.choose_units(order, units, names.begins, budget)
        return choose.all_tokens(units, taken, None, shape), units.size[taken]

    def _budget(self, rate: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        most = min(self.most, self.text)
        return np.minimum(most, np.maximum(1, np.rint(rate * tokens))).astype(np.int64)

    def describe(self) -> str:
        sees = "what is before it" if self.causal else "all of it"
        return (
            f"{base.percent(self.rate.last)} of {self.text} tokens of text masked, "
            f"whole names by {sees}, and the next token predicted"
        )

    def count(self, before: Batch, after: Batch) -> dict[str, float]:
        masked = self.predicted(after)[:, : self.text]
        ids = after["input_ids"][:, : self.text]
        own = before["input_ids"], before["attention_mask"], before[TYPES]
        names = self._names(*own)
        return base.count_masks(self.tokenizer, before, ids, masked) | {
            "names": int(names.begins.sum()),
            "masked_names": int(after["mlm_names"].max(axis=1, initial=0).sum()),
        }

    def predicted(self, batch: Batch) -> np.ndarray:
        # Every token of the clean copy is predicted; marking them would show nothing.
        return base.mark_predictions(batch, "mlm")

    def origin(self, batch: Batch) -> np.ndarray:
        columns = np.arange(self.length) % max(self.text, 1)
        return np.broadcast_to(columns, batch["input_ids"].shape)


class _Names(NamedTuple):
    """The names of rows, each [b, R]: which tokens are part of a name, which begin one
    (bool), and the number of the name, from 1; 0: not part of a name."""

    free: np.ndarray
    begins: np.ndarray
    number: np.ndarray


make_features = CuglmFeatures
