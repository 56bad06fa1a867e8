# SPDX-License-Identifier: Apache-2.0
"""Prefix language models: the context that begins a text attends to all of itself."""

import numpy as np

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.features.base import (
    Batch,
    GatheredRows,
    Settings,
    Spec,
    Specs,
    percent,
)
from bertjax.data.features.clm import ClmFeatures


class PrefixFeatures(ClmFeatures):
    """Rows of a causal LM whose sequences begin with a context: its tokens attend to
    each other and are not predicted. (Raffel et al. 2020, section 3.2.1.)

    The size of the context is drawn for each sequence: a share of its tokens, uniform
    from `least` to `most`, at least 1 token and at most all but one. With 6 tokens, 3
    of them context:

        input_ids         2 17 25 31 46  3  0
        attention_steps   0  0  0  4  5  6  0
        prefix_ids        0  0 31 46  3  0  0
        prefix_weights    0  0  1  1  1  0  0
    """

    name = "prefix"

    def __init__(
        self, settings: Settings, least: float = 0.0, most: float = 1.0
    ) -> None:
        super().__init__(settings)
        self.least, self.most = least, most
        if not 0 <= least <= most <= 1:
            raise UserError(
                f"objective: prefix's least={least} and most={most} are not shares "
                "with 0 <= least <= most <= 1"
            )

    def specs(self, gathered: Specs) -> dict[str, Spec]:
        return super().specs(gathered) | {"attention_steps": Spec((self.length,))}

    def make(self, rows: GatheredRows, drawn: list[np.ndarray] | None = None) -> Batch:
        batch = super().make(rows, drawn)
        steps = batch["attention_steps"] = self.steps(rows, batch)
        # The last token of the context predicts the first token after the context.
        before = np.pad(steps[:, 1:], ((0, 0), (0, 1))) == 0
        batch["prefix_weights"][before] = 0
        batch["prefix_ids"][before] = 0
        return batch

    def steps(self, rows: GatheredRows, batch: Batch) -> np.ndarray:
        """Return the step from which each token is visible, i32 [b, L]; context: 0."""
        sequence = batch.get("segment_ids", batch["attention_mask"])
        width = int(sequence.max(initial=0)) + 1
        number = sequence + np.arange(len(sequence))[:, None] * width
        size = np.bincount(number.ravel(), minlength=len(sequence) * width)
        key = counter_rng.fold(rows.keys, "prefix")[:, None]
        draw = counter_rng.uniform(key, np.arange(width)).ravel()
        share = self.least + (self.most - self.least) * draw
        context = np.clip((share * size).astype(np.int64), 1, np.maximum(size - 1, 1))
        place = batch.get("position_ids", np.arange(self.length))
        columns = np.arange(1, self.length + 1, dtype=np.int32)
        return columns * ((place >= context[number]) & (sequence > 0))

    def describe(self) -> str:
        least, most = map(percent, (self.least, self.most))
        return f"a context of {least} to {most}, the rest predicted"


make_features = PrefixFeatures
