# SPDX-License-Identifier: Apache-2.0
"""Pseudo-masked language models: masked tokens are predicted at once and by blocks."""

import functools

import numpy as np

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.features import base
from bertjax.data.features.base import Batch, GatheredRows, Settings, Spec, Specs
from bertjax.data.features.mlm import MlmFeatures
from bertjax.data.masking import choose, mask_rates
from bertjax.data.masking.masker import PresetMasker
from bertjax.data.masking.presets import (
    Masking,
    make_masking,
    predictions_per_sequence,
)

_BLOCK = 1 << 16  # tokens whose rows are created at a time: they fit in the cache
_AHEAD = 16  # attempts that are drawn at a time


class PmlmFeatures(MlmFeatures):
    """A row of L slots: text in the first R, then P pseudo masks, then P originals.

    R is the most tokens that leave room for two copies of the P = ceil(rate R) chosen
    ones: with 128, 256, 512, 640, 768 slots at 0.15 it is 98, 196, 393, 492, 590.
    Tokens are chosen by blocks, in the order in which the blocks are predicted
    (`draw_blocks`). Each token is predicted twice: at its mask from the text
    (autoencoding, `mlm_*`), and at its pseudo mask from the text and the originals of
    earlier blocks (partially autoregressive, `par_*`). `attention_steps` state this:
    the pseudo masks of a block attend to each other, to the text and to the originals
    of earlier blocks; the originals of a block attend to each other, to the text and to
    the originals of earlier blocks; the text attends to the text alone. Mask and pseudo
    mask are both the tokenizer's mask, as in microsoft/unilm's s2s-ft; their steps
    differ. If data.corruption puts another token in place of a mask, it replaces both.
    Copies have the position, token type and sequence of the token that they stand for.

    (Bao et al. 2020, UniLMv2, section 3; the code of its pretraining is unpublished.)

    R = 6, P = 2, 4 = mask; block 1 is the token 31, block 2 the token 25:

                         text               pseudo  original
        gathered         2 17 25 31 46  3
        input_ids        2 17  4  4 46  3    4  4    25 31
        attention_steps  0  0  0  0  0  0   -2 -1     2  1
        position_ids     0  1  2  3  4  5    2  3     2  3
        mlm_positions          2  3
        par_positions                        6  7
        ids of both           25 31
    """

    keys = frozenset({"mask_rate", "corruption", "replacement"})

    def __init__(
        self, settings: Settings, blocks: float = 0.4, longest: int = 6
    ) -> None:
        super().__init__(settings)
        if not (0 <= blocks <= 1 and longest >= 2):
            raise UserError(
                f"objective: pmlm's blocks={blocks} must be a share from 0 to 1, and "
                f"longest={longest} at least 2"
            )
        self.blocks, self.longest = blocks, longest
        data = settings.config.data
        how = {key: data[key] or None for key in ("corruption", "replacement")}
        self.masking_at = functools.partial(make_masking, "bert", **how)
        usual = (self.masking_at().rate,)
        rates = [mask_rates.read(rate) or usual for rate in settings.rates]
        most = max(map(max, rates))
        rooms = ((R, predictions_per_sequence(most, R)) for R in range(1, self.length))
        self.text, self.predictions = max(
            (R, P) for R, P in rooms if R + 2 * P <= self.length
        )

    @property
    def masking(self) -> Masking:
        return self.masking_at(rate=self.rate and self.rate.last)

    @property
    def raw(self) -> int:
        return self.text

    def specs(self, gathered: Specs) -> dict[str, Spec]:
        specs, row = super().specs(gathered), Spec((self.length,))
        own = [name for name in self.per_token if name in gathered]
        specs |= dict.fromkeys([*own, "position_ids", "attention_steps"], row)
        specs |= base.prediction_specs("par", self.predictions)
        return specs | {"text_tokens": Spec(())}

    def make(self, rows: GatheredRows, drawn: list[np.ndarray] | None = None) -> Batch:
        arrays, b = base.without_marks(rows.arrays), len(rows.keys)
        if "position_ids" not in arrays:
            places = np.arange(self.text, dtype=np.int32)
            arrays["position_ids"] = np.broadcast_to(places, (b, self.text))
        rate = self.rate and self.rate.at(rows.progress)
        masker = PresetMasker(self.masking_at(rate=rate))
        batch = {
            name: arrays[name]
            if name in arrays and name not in self.per_token
            else np.zeros((b, *spec.shape), spec.dtype)
            for name, spec in self.specs({k: Spec(()) for k in arrays}).items()
        }
        batch["input_ids"][:, self.text :] = self.tokenizer.pad_id
        batch["text_tokens"][:] = arrays["attention_mask"].sum(axis=1)
        step = max(1, _BLOCK // self.text)
        for low in range(0, b, step):
            part = slice(low, low + step)
            own = {n: arrays[n][part] for n in self.per_token if n in arrays}
            out = {name: values[part] for name, values in batch.items()}
            self._fill(masker, rows.keys[part], own, out, drawn)
        return batch

    def _fill(
        self,
        masker: PresetMasker,
        keys: np.ndarray,
        arrays: Batch,
        out: Batch,
        drawn: list[np.ndarray] | None,
    ) -> None:
        """Write some rows into `out`, which is 0, with padding ids after the text."""
        text, P = self.text, self.predictions
        rows = choose.Rows(arrays["input_ids"], arrays["attention_mask"], keys)
        budget = choose.budgets(rows, masker.masking, P)
        free = choose.is_text(rows, self.tables)
        steps = draw_blocks(keys, free, budget, self.blocks, self.longest, 4 * P + 32)
        if drawn is not None:
            block = steps + np.arange(len(steps))[:, None] * (P + 1)
            drawn.append(np.unique(block[steps > 0], return_counts=True)[1])

        [column] = choose.in_rows([np.flatnonzero(steps)], steps.shape)
        used, width = column < text, column.shape[1]
        at = column * used
        flat = at + np.arange(len(at))[:, None] * text
        pseudo, original = (slice(low, low + width) for low in (text, text + P))
        for name, values in arrays.items():
            copies = values.reshape(-1).take(flat)
            out[name][:, :text] = values
            for copy in (pseudo, original):
                np.copyto(out[name][:, copy], copies, where=used)
        step = steps.reshape(-1).take(flat) * used
        out["attention_steps"][:, pseudo] = -step
        out["attention_steps"][:, original] = step

        truth = rows.ids.reshape(-1).take(flat)
        chosen = choose.Chosen(column, column, column)
        new = masker.corrupt(truth, chosen, rows, self.tables)
        row, slot = np.nonzero(used)
        out["input_ids"][row, column[row, slot]] = new[row, slot]
        np.copyto(out["input_ids"][:, pseudo], new, where=used)
        for name, places in (("mlm", at), ("par", np.arange(text, text + width))):
            out[f"{name}_positions"][:, :width] = places * used
            out[f"{name}_ids"][:, :width] = truth * used
            out[f"{name}_weights"][:, :width] = used

    def describe(self) -> str:
        return f"{super().describe()} by blocks, of {self.text} tokens of text"

    def count(self, before: Batch, after: Batch) -> dict[str, float]:
        ids, chosen = (
            x[:, : self.text] for x in (after["input_ids"], self.predicted(after))
        )
        blocks = int(after["attention_steps"].max(axis=1).sum())
        return {
            **base.count_masks(self.tokenizer, before, ids, chosen),
            "blocks": blocks,
        }

    def predicted(self, batch: Batch) -> np.ndarray:
        return super().predicted(batch) | base.mark_predictions(batch, "par")

    def origin(self, batch: Batch) -> np.ndarray:
        at, columns = batch["mlm_positions"], np.arange(self.text)
        spare = np.zeros((len(at), self.length - self.text - 2 * self.predictions), int)
        text = np.broadcast_to(columns, (len(at), self.text))
        return np.concatenate([text, at, at, spare], axis=1)


def draw_blocks(
    keys: np.ndarray,
    free: np.ndarray,
    budget: np.ndarray,
    blocks: float,
    longest: int,
    attempts: int,
) -> np.ndarray:
    """Choose tokens by blocks: i32 [b, R], the number of the block, from 1; 0: none.

    keys u64 [b]; free bool [b, R]: tokens that may be chosen; budget i64 [b]. An
    attempt draws the start of a block, uniform over the free tokens, and its length:
    with probability `blocks` uniform from 2 to `longest`, otherwise 1. A block is taken
    if all of it is free and in no earlier block; tokens that exceed the budget are cut
    off. If budget is left after this many attempts, in rows with few free tokens, it is
    filled with single tokens. Blocks are numbered in the order of drawing. (Bao et al.
    2020, section 3.3.)

    Worked example: a budget of 4, with attempts (begin, length):

        free              0 1 1 1 1 1 0
        (2, 2)            0 0 1 1 0 0 0
        (1, 2)            0 0 1 1 0 0 0    2 is in block 1
        (4, 3)            0 0 1 1 0 0 0    6 is not free
        (4, 1)            0 0 1 1 2 0 0
        (5, 1)            0 0 1 1 2 3 0
    """
    b, length = free.shape
    width = length + longest  # a block may extend beyond its row
    number = np.full((b, width), -1, np.int32)
    number[:, :length] = free
    number[:, :length] -= 1
    cells = number.reshape(-1)
    begins = np.flatnonzero(cells == 0)
    bounds = np.searchsorted(begins, np.arange(b + 1) * width)
    many = np.diff(bounds)
    left, last = np.minimum(budget, many), np.zeros(b, np.int32)
    reach = np.arange(longest)[:, None]
    for first in range(0, attempts, _AHEAD):
        todo = np.flatnonzero(left)
        if not todo.size:
            break
        attempt = np.arange(first, min(first + _AHEAD, attempts))[:, None]
        draw = counter_rng.below(
            counter_rng.fold(keys[todo], "begin"), attempt, many[todo]
        )
        begin = begins.take(bounds[todo] + draw)
        draw = counter_rng.uniform(counter_rng.fold(keys[todo], "size"), attempt)
        size = 2 + np.floor(draw / max(blocks, 1e-9) * (longest - 1)).astype(int)
        size = np.where(draw < blocks, np.minimum(size, longest), 1)
        own_left, own_last = left[todo], last[todo]
        for at, tokens in zip(begin[:, None] + reach, size, strict=True):
            taken = ~((cells.take(at) != 0) & (reach < tokens)).any(axis=0)
            tokens = np.minimum(tokens, own_left) * taken
            own_left -= tokens
            own_last += tokens > 0
            block = reach < tokens
            cells[at[block]] = np.broadcast_to(own_last, block.shape)[block]
        left[todo], last[todo] = own_left, own_last
    todo = np.flatnonzero(left)
    if todo.size:
        _fill_up(keys[todo], number, todo, left[todo], last[todo])
    return np.maximum(number[:, :length], 0)


def _fill_up(keys: np.ndarray, number: np.ndarray, todo: np.ndarray, left, last):
    """Choose `left` of the free tokens of the rows `todo`, each as its own block."""
    rest = number[todo]
    noise = counter_rng.bits(
        counter_rng.fold(keys, "single")[:, None], np.arange(rest.shape[1])
    )
    order = np.argsort(np.where(rest == 0, noise, choose.MAX_NOISE), axis=1)
    row, slot = np.nonzero(np.arange(left.max()) < left[:, None])
    number[todo[row], order[row, slot]] = last[row] + 1 + slot


make_features = PmlmFeatures
