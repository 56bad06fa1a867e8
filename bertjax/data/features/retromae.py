# SPDX-License-Identifier: Apache-2.0
"""RetroMAE: masked rows for an encoder, and their originals for a weak decoder.

Xiao et al. 2022 (arXiv 2205.12035), section 3. The device draws which tokens the
decoder sees, because that needs no arrays in the batch; the keys of these draws are
created here.
"""

import numpy as np

from bertjax.data import counter_rng
from bertjax.data.features import base
from bertjax.data.features.base import Batch, GatheredRows, Settings, Spec, Specs
from bertjax.data.features.mlm import MlmFeatures
from bertjax.data.token_flags import BEGINS_WORD


class RetromaeFeatures(MlmFeatures):
    """Masked rows as in `mlm`, and the original ids of all their tokens.

    retromae_words numbers the words of a row from 1; special tokens and padding have 0.
    retromae_keys holds the random bits of a key. Words "un ##do" and "it", with "it"
    masked:

        input_ids           2  17  25   4   3   0
        mlm_ids            31
        retromae_ids        2  17  25  31   3   0
        retromae_words      0   1   1   2   0   0
        retromae_weights    0   1   1   1   0   0
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.special = base.special_pieces(self.tokenizer)

    def specs(self, gathered: Specs) -> dict[str, Spec]:
        row = (self.length,)
        return super().specs(gathered) | {
            "retromae_ids": Spec(row),
            "retromae_words": Spec(row),
            "retromae_weights": Spec(row, "float32", loss=True),
            "retromae_keys": Spec((2,)),
        }

    def make(self, rows: GatheredRows, drawn: list[np.ndarray] | None = None) -> Batch:
        batch = super().make(rows, drawn)
        ids = put_back(batch)
        words = self.number_words(ids, batch["attention_mask"], rows.arrays)
        keys = counter_rng.fold(rows.keys, "visible")
        return batch | {
            "retromae_ids": ids,
            "retromae_words": words,
            "retromae_weights": (words > 0).astype(np.float32),
            "retromae_keys": keys.astype("<u8").view("<i4").reshape(-1, 2),
        }

    def number_words(self, ids: np.ndarray, real: np.ndarray, had: Batch) -> np.ndarray:
        """Number the words of each row from 1: i32 [b, L], 0 outside words."""
        is_text = (real > 0) & ~self.special[ids]
        marks = had.get("marks")
        if marks is None:
            begins = self.tokenizer.word_starts[ids] > 0
        else:
            begins = marks & BEGINS_WORD > 0
        begins[:, 1:] |= ~is_text[:, :-1]
        begins[:, 0] = True
        return np.cumsum(begins & is_text, axis=1, dtype=np.int32) * is_text

    def describe(self) -> str:
        return f"{super().describe()}, all by the decoder"


def put_back(batch: Batch) -> np.ndarray:
    """Return input_ids [b, L] with the original ids in place of the masked ones."""
    ids = batch["input_ids"].copy()
    row, slot = np.nonzero(batch["mlm_weights"])
    ids[row, batch["mlm_positions"][row, slot]] = batch["mlm_ids"][row, slot]
    return ids


make_features = RetromaeFeatures
