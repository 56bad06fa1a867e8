# SPDX-License-Identifier: Apache-2.0
"""Masked language models: tokens are chosen, corrupted and predicted in place."""

import functools
from typing import Any

import numpy as np

from bertjax.data.features import base
from bertjax.data.features.base import Batch, GatheredRows, Settings, Spec, Specs
from bertjax.data.features.concept_labels import (
    label_specs,
    make_labels,
    names_of,
)
from bertjax.data.masking import mask_rates
from bertjax.data.masking.choose import Rows
from bertjax.data.masking.counterfactual import draw_rows, swap_words
from bertjax.data.masking.masker import mask_tokens, read_masker


class MlmFeatures(base.Features):
    """Rows as they are gathered, corrupted; P predictions per row, `mlm_*`."""

    keys = base.KEYS - {"noise"}
    name = "mlm"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        data = settings.config.data
        base.check_mask(settings)
        self.tables, self.concepts = settings.tables, names_of(data)
        self.rate = mask_rates.read(settings.mask_rate)
        self.masker_at = functools.lru_cache(2)(functools.partial(read_masker, data))
        self.predictions = mask_rates.predictions(data, settings.length, settings.rates)

    @property
    def masking(self) -> Any:
        """The masking at the end of the phase."""
        return self.masker_at(self.rate and self.rate.last)

    def specs(self, gathered: Specs) -> dict[str, Spec]:
        own = base.prediction_specs(self.name, self.predictions)
        labels = label_specs(self.concepts, self.predictions, gathered)
        return {**gathered, **own, **labels}

    def make(self, rows: GatheredRows, drawn: list[np.ndarray] | None = None) -> Batch:
        arrays = self._swap(rows.arrays, rows.keys) if self.swaps else rows.arrays
        batch = base.without_marks(arrays)
        masked = mask_tokens(
            batch["input_ids"], batch["attention_mask"], rows.keys,
            self.masker_at(self.rate and self.rate.at(rows.progress)),
            self.tables, self.predictions, rows.arrays.get("marks"), drawn,
        )  # fmt: skip
        labels = make_labels(self.concepts, rows, masked.mlm_positions)
        return batch | masked._asdict() | labels

    @property
    def swaps(self) -> bool:
        """Whether half of the rows get counterfactual words (data.swap)."""
        return getattr(self.tables, "pairs", None) is not None

    def _swap(self, arrays: Batch, keys: np.ndarray) -> Batch:
        """Return the arrays with counterfactual words in half of the rows."""
        ids, real = arrays["input_ids"], arrays["attention_mask"]
        rows = Rows(ids, real, keys, arrays.get("marks"))
        new = swap_words(rows, self.tables, draw_rows(keys))
        return arrays | {"input_ids": new}

    def describe(self) -> str:
        ends = self.rate or (self.masking.rate,)
        return f"{' to '.join(map(base.percent, dict.fromkeys(ends)))} predicted"

    def count(self, before: Batch, after: Batch) -> dict[str, float]:
        chosen = self.predicted(after)
        own, counts = before["input_ids"], {}
        if self.swaps:
            before = self._swap(before, before["keys"])
            counts["swapped"] = int((before["input_ids"] != own).sum())
        return counts | base.count_masks(
            self.tokenizer, before, after["input_ids"], chosen
        )

    def predicted(self, batch: Batch) -> np.ndarray:
        return base.mark_predictions(batch, "mlm")


make_features = MlmFeatures
