# SPDX-License-Identifier: Apache-2.0
"""Masked next-token prediction: the position before a masked token predicts it."""

import numpy as np

from bertjax.data.features import base
from bertjax.data.features.base import Batch, GatheredRows
from bertjax.data.features.mlm import MlmFeatures


class MntpFeatures(MlmFeatures):
    """Rows of a masked LM whose predictions move one place to the left, so that they
    use the head of a causal LM. (BehnamGhader et al. 2024, LLM2Vec, section 2.2;
    Charpentier and Samuel 2024, GPT-BERT, section 2.)

    With the tokens at 2 and 4 masked:

        input_ids        2 17  4 31  4  3  0  0
        mntp_positions      1     3           0
        mntp_ids           25    46           0
        mntp_weights        1     1           0

    The first token of a sequence is never predicted, because no token precedes it.
    """

    name = "mntp"

    def make(self, rows: GatheredRows, drawn: list[np.ndarray] | None = None) -> Batch:
        batch = super().make(rows, drawn)
        at, ids, weights = (
            batch.pop(f"mlm_{what}") for what in ("positions", "ids", "weights")
        )
        sequence = batch.get("segment_ids", batch["attention_mask"])
        before = np.maximum(at - 1, 0)
        taken = (np.take_along_axis(sequence, x, 1) for x in (at, before))
        right = np.equal(*taken) & (at > 0) & (weights > 0)
        own = before * right, ids * right, weights * right
        for what, values in zip(("positions", "ids", "weights"), own, strict=True):
            batch[f"mntp_{what}"] = values
        return batch

    def predicted(self, batch: Batch) -> np.ndarray:
        return base.mark_predictions(batch, "mntp", ahead=1)


make_features = MntpFeatures
