# SPDX-License-Identifier: Apache-2.0
"""A host half whose rows contain their text twice, with one weight per row."""

import numpy as np

from bertjax.data.features.base import Features, Spec, prediction_specs

TEXT = ("input_ids", "attention_mask", "token_type_ids")


class Copies(Features):
    """Plan text for half of a row, repeat it, and predict its first token."""

    @property
    def raw(self):
        return self.length // 2

    def specs(self, gathered):
        own = dict(gathered) | dict.fromkeys(TEXT, Spec((self.length,)))
        norm = Spec((), "float32", loss=True)
        return own | prediction_specs("mlm", 1) | {"mlm_norm": norm}

    def make(self, rows, drawn=None):
        twice = {name: np.tile(rows.arrays[name], 2) for name in TEXT}
        one = np.ones((len(rows.place), 1), np.int32)
        truth = twice["input_ids"][:, 1:2]
        predicted = {"mlm_positions": one, "mlm_ids": truth}
        weights = one.astype(np.float32)
        return twice | predicted | {"mlm_weights": weights, "mlm_norm": weights[:, 0]}

    def origin(self, batch):
        columns = np.tile(np.arange(self.raw), 2)
        return np.broadcast_to(columns, batch["input_ids"].shape)


def make_features(settings):
    return Copies(settings)
