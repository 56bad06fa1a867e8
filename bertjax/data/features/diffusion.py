# SPDX-License-Identifier: Apache-2.0
"""Masked diffusion: tokens are masked at a rate that is drawn for each text.

The time t runs from 0, where nothing is masked, to 1. `linear` masks at the rate t,
`cosine` at 1 - cos(pi t / 2), which is 0.36 on average (CosineNoise of
kuleshov-group/bd3lms); eps lifts either rate to eps + (1 - eps) rate. The weight of a
masked token decides the loss. `mdlm` weighs by the slope of the rate in t over the
rate: with any schedule the loss is then a bound of the text's negative log-likelihood
(Sahoo et al. 2024, MDLM, section 3; Shi et al. 2024, MD4). `llada` weighs by 1 / rate
(Nie et al. 2025, LLaDA, algorithm 1); with the linear schedule `mdlm` is the same but
for a factor of 1 - eps. `none` weighs by 1.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError, registry
from bertjax.data import counter_rng
from bertjax.data.features import base
from bertjax.data.features.base import Batch, GatheredRows, Settings, Spec, Specs
from bertjax.data.token_flags import SPECIAL

HALF_PI = np.pi / 2
Law = Callable[[Any], Any]


class Schedule(NamedTuple):
    """The share of masked tokens at a time t, its slope, and the time for a share."""

    share: Law
    slope: Law
    time: Law


SCHEDULES = {
    "linear": Schedule(lambda t: t, np.ones_like, lambda share: share),
    "cosine": Schedule(
        lambda t: 1 - np.cos(HALF_PI * t),
        lambda t: HALF_PI * np.sin(HALF_PI * t),
        lambda share: np.arccos(1 - share) / HALF_PI,
    ),
}
WEIGHTS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "mdlm": lambda rate, slope: slope / rate,
    "llada": lambda rate, slope: 1 / rate,
    "none": lambda rate, slope: np.ones_like(rate),
}
# Steps on the circle [0, 1), in units of 2^-64: the golden ratio from row to row, the
# square root of 2 from unit to unit in a row. Neighboring rows cover [0, 1) evenly.
BY_PLACE, BY_UNIT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x6A09E667F3BCC908)
OFFSET, LOW_BITS = np.uint64(2**63), np.uint64(11)


def spread_evenly(place: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each unit of each row, f64, from their numbers.

    It depends on these numbers alone, so that it is the same in any batch and on any
    host, and yet neighboring rows get well separated numbers. (Kingma et al. 2021,
    appendix I, spread them over a batch.)
    """
    word = place.astype(np.uint64) * BY_PLACE + unit.astype(np.uint64) * BY_UNIT
    return ((word + OFFSET) >> LOW_BITS) * 2.0**-53


class DiffusionFeatures(base.Features):
    """Each token of text is masked independently at the rate of its row; in packed rows
    each sequence has its own rate. `diffusion_norm` f32 [b] counts the tokens that can
    be masked. With a rate of 0.4 and weights 1 / rate:

        input_ids             2   17    4   31    4    3    0
        diffusion_ids         2   17   25   31   46    3    0
        diffusion_weights     0    0  2.5    0  2.5    0    0
        diffusion_norm        4

    With blocks, a row holds its text twice, masked and clean, and each block has its
    own rate. A masked block attends to itself and to the clean blocks before it
    (Arriola et al. 2025, BD3-LM, section 3). Blocks of 2:

        input_ids           2  4 25  4  4  3    2 17 25 31 46  3
        position_ids        0  1  2  3  4  5    0  1  2  3  4  5
        attention_steps    -1 -1 -2 -2 -3 -3    1  1  2  2  3  3

    low, high: t is uniform between the times of these two rates (BD3-LM, section 5).
    """

    def __init__(
        self,
        settings: Settings,
        schedule: str = "linear",
        weights: str = "mdlm",
        low: float = 0.0,
        high: float = 1.0,
        block: int = 0,
        eps: float = 1e-3,
    ) -> None:
        super().__init__(settings)
        base.check_mask(settings)
        where = "objective: diffusion's"
        self.schedule = registry.pick(f"{where} schedule", schedule, SCHEDULES)
        self.weigh = registry.pick(f"{where} weights", weights, WEIGHTS)
        self.low, self.high, self.eps = max(low, eps), high, eps
        if not (0 <= low <= high <= 1 and 0 <= eps < high and self.low > 0):
            raise UserError(
                f"{where} low={low}, high={high} and eps={eps} are not rates with "
                "0 <= low <= high, eps < high <= 1, of which low or eps is above 0"
            )
        if block < 0:
            raise UserError(f"{where} block={block}: give its tokens, or 0 for none")
        if block and self.length % 2:
            raise UserError(
                f"data.length={self.length}: with blocks a row holds its text twice: "
                "give an even length"
            )
        self.block, self.named = block, f"{schedule}, weights {weights}"
        self.flags, self.mask_id = settings.tables.flags, settings.tables.mask_id
        shares = (np.array([self.low, high]) - eps) / (1 - eps)
        self.first, self.last = self.schedule.time(shares)

    @property
    def raw(self) -> int:
        return self.length // 2 if self.block else self.length

    def specs(self, gathered: Specs) -> dict[str, Spec]:
        row, whole = Spec((self.raw,)), Spec((self.length,))
        weights = Spec(row.shape, "float32", loss=True)
        own = {"diffusion_ids": row, "diffusion_weights": weights}
        own["diffusion_norm"] = Spec((), "float32", loss=True)
        if self.block:
            names = [
                *(gathered.keys() & {*self.per_token}),
                "position_ids",
                "attention_steps",
            ]
            own |= dict.fromkeys(names, whole)
            own |= {"diffusion_positions": row, "text_tokens": Spec(())}
        return dict(gathered) | own

    def make(self, rows: GatheredRows, drawn: list[np.ndarray] | None = None) -> Batch:
        batch = base.without_marks(rows.arrays)
        ids, real = batch["input_ids"], batch["attention_mask"] > 0
        columns = np.arange(self.raw, dtype=np.int32)
        position = batch.get("position_ids", np.broadcast_to(columns, ids.shape))
        size = self.block or self.raw
        begins = (position % size == 0) & real
        unit = np.maximum(np.cumsum(begins, axis=1) - 1, 0)
        rates = self.rates(rows.place, int(unit.max(initial=0)) + 1)
        rate, weight = (np.take_along_axis(x, unit, axis=1) for x in rates)
        is_text = real & (self.flags[ids] & SPECIAL == 0)
        key = counter_rng.fold(rows.keys, "diffusion")[:, None]
        masked = is_text & (counter_rng.uniform(key, columns) < rate)
        noised = np.where(masked, np.int32(self.mask_id), ids)
        batch |= {
            "input_ids": noised,
            "diffusion_ids": ids,
            "diffusion_weights": (weight * masked).astype(np.float32),
            "diffusion_norm": is_text.sum(axis=1, dtype=np.float32),
        }
        if self.block:
            batch["position_ids"] = position
            batch |= {
                name: np.concatenate([batch[name], rows.arrays.get(name, position)], 1)
                for name in batch.keys() & {*self.per_token}
            }
            step = (position // self.block + 1) * real
            batch["attention_steps"] = np.concatenate([-step, step], axis=1)
            batch["diffusion_positions"] = np.broadcast_to(columns, ids.shape)
            batch["text_tokens"] = real.sum(axis=1, dtype=np.int32)
        return batch

    def rates(self, place: np.ndarray, units: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rate and the weight of each unit of rows, f64 [b, units].

        A unit shares one rate: it is a block, or a sequence if there are no blocks.
        """
        even = spread_evenly(place[:, None], np.arange(units))
        t = self.first + (self.last - self.first) * even
        rate = self.eps + (1 - self.eps) * self.schedule.share(t)
        return rate, self.weigh(rate, (1 - self.eps) * self.schedule.slope(t))

    def describe(self) -> str:
        low, high = map(base.percent, (self.low, self.high))
        blocks = f", in blocks of {self.block} behind clean ones" * (self.block > 0)
        return f"{low} to {high} masked ({self.named}){blocks}"

    def count(self, before: Batch, after: Batch) -> dict[str, float]:
        """Count masks, maskable tokens, and the rows in each tenth of masked tokens."""
        chosen, text = after["diffusion_weights"] > 0, after["diffusion_norm"]
        ids = after["input_ids"][:, : self.raw]
        tenth = 10 * chosen.sum(axis=1) // np.maximum(text, 1)
        rows = np.bincount(np.minimum(tenth.astype(np.int64), 9), minlength=10)
        counts = base.count_masks(self.tokenizer, before, ids, chosen)
        counts["maskable"] = int(text.sum())
        return counts | {f"rows_masked_{10 * k}%": int(n) for k, n in enumerate(rows)}

    def predicted(self, batch: Batch) -> np.ndarray:
        weights = batch["diffusion_weights"] > 0
        return np.pad(weights, ((0, 0), (0, self.length - self.raw)))

    def origin(self, batch: Batch) -> np.ndarray:
        columns = np.arange(self.length) % self.raw
        return np.broadcast_to(columns, batch["input_ids"].shape)


make_features = DiffusionFeatures
