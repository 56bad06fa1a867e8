# SPDX-License-Identifier: Apache-2.0
"""Both halves of an objective that no system has: neighboring tokens are swapped, and
the model predicts for each token whether it was swapped."""

import jax.numpy as jnp
import numpy as np

from bertjax.data import counter_rng
from bertjax.data.features.base import Features, Spec
from bertjax.data.masking.choose import Rows, is_text
from bertjax.models.layers import draw, linear_specs
from bertjax.objectives.base import Head
from bertjax.objectives.losses import binary_cross_entropy
from bertjax.objectives.metrics import binary_metrics


class SwapFeatures(Features):
    """Swap pairs of neighboring text tokens with probability `rate`.

    Columns 1 and 2 are a pair, 3 and 4 the next, and so on; here the second is swapped:

        input_ids      2 17 25 46 31  3
        swap_labels    0  0  0  1  1  0
        swap_weights   0  1  1  1  1  0
    """

    def __init__(self, settings, rate):
        super().__init__(settings)
        self.tables, self.rate = settings.tables, rate

    def specs(self, gathered):
        row = (self.length,)
        return dict(gathered) | {
            "swap_labels": Spec(row),
            "swap_weights": Spec(row, "float32", loss=True),
        }

    def make(self, rows, drawn=None):
        batch = {k: v for k, v in rows.arrays.items() if k != "marks"}
        ids = batch["input_ids"].copy()
        text = is_text(Rows(ids, batch["attention_mask"], rows.keys), self.tables)
        left = np.arange(1, self.length - 1, 2)
        both = text[:, left] & text[:, left + 1]
        key = counter_rng.fold(rows.keys, "lab.swap")[:, None]
        row, pair = np.nonzero(both & (counter_rng.uniform(key, left) < self.rate))
        at = left[pair]
        ids[row, at], ids[row, at + 1] = ids[row, at + 1], ids[row, at]
        labels = np.zeros_like(ids)
        labels[row, at] = labels[row, at + 1] = 1
        own = {"swap_labels": labels, "swap_weights": text.astype(np.float32)}
        return batch | own | {"input_ids": ids}

    def count(self, before, after):
        return {"swapped": int(after["swap_labels"].sum())}

    def predicted(self, batch):
        return batch["swap_labels"] > 0

    def describe(self):
        return f"{self.rate:.0%} of neighbours swapped"


def make_features(settings, rate=0.2):
    return SwapFeatures(settings, rate)


def make_head(rate=0.2):
    def init(rng, cfg):
        return draw(rng, linear_specs(into=(cfg.hidden_size,), out=(1,)), 0.02)

    def sums(params, cfg, encoded, batch, rng):
        hidden = encoded.hidden.astype(jnp.float32)
        logits = (hidden @ params["swap"]["kernel"] + params["swap"]["bias"])[..., 0]
        labels, weights = batch["swap_labels"] > 0, batch["swap_weights"]
        metrics = binary_metrics(logits, labels, weights)
        loss = binary_cross_entropy(logits, labels, weights)
        return {"swap_loss": loss, "swap_auc": metrics["auc"]}

    return Head(
        "swap",
        init,
        lambda batch: {"swap_loss": jnp.sum(batch["swap_weights"])},
        sums,
        reads="everywhere",
        needs=frozenset({f"lab.swap:rate={rate}"}),
        shardings=(("swap/kernel", "embed classes"), ("swap/bias", "classes")),
        flops=lambda cfg, length, predictions: 6.0 * cfg.hidden_size,
    )
