# SPDX-License-Identifier: Apache-2.0
"""Causal language models: each token predicts the next one of its sequence."""

import numpy as np

from bertjax.data.features import base
from bertjax.data.features.base import Batch, GatheredRows, Spec, Specs


class ClmFeatures(base.Features):
    """Rows as they are gathered; `clm_ids` and `clm_weights` at every position.

    The device half (Head.causal) makes each token attend to itself and earlier tokens
    only. A row of two packed sequences:

        input_ids        2 17 25  3  2 46  3  0
        clm_ids         17 25  3  0 46  3  0  0
        clm_weights      1  1  1  0  1  1  0  0
    """

    name = "clm"

    def specs(self, gathered: Specs) -> dict[str, Spec]:
        row = (self.length,)
        specs = dict(gathered) | {f"{self.name}_ids": Spec(row)}
        return specs | {f"{self.name}_weights": Spec(row, "float32", loss=True)}

    def make(self, rows: GatheredRows, drawn: list[np.ndarray] | None = None) -> Batch:
        batch = base.without_marks(rows.arrays)
        ids, weights = next_tokens(batch)
        return batch | {f"{self.name}_ids": ids, f"{self.name}_weights": weights}

    def describe(self) -> str:
        return "the next token predicted"

    def count(self, before: Batch, after: Batch) -> dict[str, float]:
        return {"predicted": int((after[f"{self.name}_weights"] > 0).sum())}

    def predicted(self, batch: Batch) -> np.ndarray:
        weights = batch[f"{self.name}_weights"] > 0
        return np.pad(weights[:, :-1], ((0, 0), (1, 0)))


def next_tokens(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the id after each token, i32 [b, L], and weights f32 [b, L].

    The weight is 1 if the next token belongs to the same sequence; otherwise id and
    weight are 0.
    """
    ids = batch["input_ids"]
    sequence = batch.get("segment_ids", batch["attention_mask"])
    same = np.zeros(ids.shape, bool)
    same[:, :-1] = (sequence[:, 1:] == sequence[:, :-1]) & (sequence[:, 1:] > 0)
    following = np.zeros_like(ids)
    np.multiply(ids[:, 1:], same[:, :-1], out=following[:, :-1])
    return following, same.astype(np.float32)


make_features = ClmFeatures
