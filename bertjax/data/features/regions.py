# SPDX-License-Identifier: Apache-2.0
"""Texts with the regions of an image: one side of a row is masked, never both.

UNITER's conditional masking (Chen et al. 2020, arXiv 1909.11740, section 3.1). In rows
about words, the masker hides words and all regions are visible; in rows about regions,
some regions are hidden and all words are visible; in other rows nothing is hidden. A
hidden region's feature is 0, and its box stays.
"""

import math

import numpy as np

from bertjax import registry
from bertjax.data import counter_rng
from bertjax.data.features.base import (
    Batch,
    GatheredRows,
    Settings,
    Spec,
    Specs,
    percent,
)
from bertjax.data.features.mlm import MlmFeatures

WORDS, REGIONS = 0, 1  # values of region_task that are masked (tasks/types/regions.py)
GATHERED = "region_task", "region_classes"  # gathered arrays that are in no batch


class RegionFeatures(MlmFeatures):
    """Rows with P predictions of words, `mlm_*`, and K of regions: region_positions i32
    [K], indices of regions, region_targets f32 [K, F], region_weights f32 [K], and if
    there are classes region_classes, i32 [K] or f32 [K, C].

    Rows without images, such as those of a made-up text, are masked as in a masked LM.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        task = settings.config.task
        self.region_rate = task.region_mask_rate
        shares = registry.split_list(task.region_mixture)  # KIND=NUMBER each
        self.kinds = [share.partition("=")[0].strip() for share in shares]
        if task.hide_regions:  # then no region is predicted
            self.kinds = ["words"]

    def _room(self, regions: int) -> int:
        """Return K, the room for predictions of regions in a row."""
        return max(1, math.ceil(self.region_rate * regions - 1e-9))

    def specs(self, gathered: Specs) -> dict[str, Spec]:
        if "region_task" not in gathered:
            return super().specs(gathered)
        kept = {name: s for name, s in gathered.items() if name not in GATHERED}
        regions, width = gathered["region_features"].shape
        room = self._room(regions)
        own = {
            "region_positions": Spec((room,)),
            "region_targets": Spec((room, width), "float32"),
            "region_weights": Spec((room,), "float32", loss=True),
            "alignment_weights": Spec((), "float32", loss=True),
        }
        if classes := gathered.get("region_classes"):
            shape = room, *classes.shape[1:]
            own["region_classes"] = Spec(shape, classes.dtype)
        return super().specs(kept) | own

    def make(self, rows: GatheredRows, drawn: list[np.ndarray] | None = None) -> Batch:
        """Mask at most one side of each row.

        In a row about regions, round(rate * regions) of them are masked, at least one:

            region_features  1 2   3 4   5 6    region_positions  1
            region_features' 1 2   0 0   5 6    region_targets    3 4
            region_weights                      1
        """
        batch = super().make(rows, drawn)
        if "region_task" not in batch:
            return batch
        kind = batch["region_task"]
        is_words = (kind == WORDS)[:, None]
        ids = rows.arrays["input_ids"]
        batch["input_ids"] = np.where(is_words, batch["input_ids"], ids)
        for name in ("mlm_positions", "mlm_ids", "mlm_weights"):
            batch[name] = batch[name] * is_words.astype(batch[name].dtype)
        batch |= self._mask_regions(batch, rows.keys, kind == REGIONS)
        del batch["region_task"]
        return batch

    def _mask_regions(self, batch: Batch, keys: np.ndarray, where: np.ndarray) -> Batch:
        """Hide regions of the rows in `where`, bool [b]."""
        features, real = batch["region_features"], batch["region_mask"] > 0
        count, room = real.sum(axis=1), self._room(real.shape[1])
        budget = np.clip(np.rint(self.region_rate * count), 1, room)
        budget = np.minimum(budget, count) * where
        key = counter_rng.fold(keys, "regions")[:, None]
        noise = counter_rng.uniform(key, np.arange(real.shape[1]))
        noise = np.where(real, noise, 2.0)  # sort missing regions to the end
        used = np.arange(room) < budget[:, None]
        order = np.argsort(noise, axis=1, kind="stable")[:, :room]
        order = np.sort(np.where(used, order, real.shape[1]), axis=1)
        positions = np.where(used, order, 0)
        at = np.arange(len(positions))[:, None]
        hidden = np.zeros(real.shape, bool)
        row, slot = np.nonzero(used)
        hidden[row, positions[row, slot]] = True
        out = {
            "region_features": np.where(hidden[..., None], np.float32(0), features),
            "region_positions": positions.astype(np.int32),
            "region_targets": features[at, positions] * used[..., None],
            "region_weights": used.astype(np.float32),
        }
        if (classes := batch.get("region_classes")) is not None:
            shape = *used.shape, *(1,) * (classes.ndim - 2)
            chosen = classes[at, positions] * used.reshape(shape)
            out["region_classes"] = chosen.astype(classes.dtype)
        out["region_targets"] = out["region_targets"].astype(np.float32)
        return out

    def describe(self) -> str:
        each = {
            "words": super().describe(),
            "regions": f"{percent(self.region_rate)} of the regions",
        }
        masked = [what for kind, what in each.items() if kind in self.kinds]
        return ", or ".join(masked) or "nothing masked"

    def count(self, before: Batch, after: Batch) -> dict[str, float]:
        counts = super().count(before, after)
        if "region_task" not in before:
            return counts
        kinds = np.bincount(before["region_task"], minlength=3).tolist()
        names = "rows_about_words", "rows_about_regions", "rows_about_pairs"
        pairs = after["alignment_weights"]
        return counts | {
            **dict(zip(names, kinds, strict=True)),
            "regions": int(after["region_mask"].sum()),
            "masked_regions": int(after["region_weights"].sum()),
            "pairs_of_two_rows": int((after["alignment_labels"] * pairs).sum()),
        }


make_features = RegionFeatures
