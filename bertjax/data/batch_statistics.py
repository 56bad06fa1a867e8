# SPDX-License-Identifier: Apache-2.0
"""Count over batches what the plan and the masking did."""

from collections import Counter
from typing import Any

import numpy as np

from bertjax.data.batches import Batch, Inspected
from bertjax.data.features.base import count_slots

# Names in `results` that apply to masked text only.
OF_TEXT = "selected_rate mask_rate random_rate keep_rate special_selected"
OF_TEXT += " special_replacements partial_words rows_without_predictions unit_lengths"
OF_TEXT = (*f"{OF_TEXT} pair_labels".split(),)

# Counts that `results` turns into rates; other counts of a host half are listed as is.
COUNTS = "rows slots tokens truncated unknown selected idle masked kept"
COUNTS = (*f"{COUNTS} special_selected special_replacements partial_words".split(),)


class Statistics:
    """Counts over batches; `show --json` prints `results`."""

    def __init__(self, tokenizer: Any, names: tuple[str, ...]) -> None:
        self.tokenizer, self.names = tokenizer, names
        self.n: Counter[str] = Counter()
        self.labels: Counter[str] = Counter()
        self.lengths: Counter[int] = Counter()  # sequence lengths in tokens
        self.drawn: Counter[int] = Counter()  # unit counts of joint choices
        self.components: Counter[str] = Counter()
        self.hashes: list[str] = []

    def add(self, seen: Inspected, sha256: str) -> None:
        """Count a batch: its rows of text, without what a host half adds to them."""
        n, batch, before = self.n, seen.batch, seen.gathered
        real = before["attention_mask"] > 0
        self.hashes.append(sha256)
        n["rows"] += len(real)
        n["slots"] += count_slots(batch)
        n["tokens"] += int(real.sum())
        n["truncated"] += int((seen.truncated > 0).sum())
        n["unknown"] += int((before["input_ids"][real] == self.tokenizer.unk_id).sum())
        self.components.update(self.names[k] for k in seen.located.component)
        self.lengths.update(sequence_lengths(before).tolist())
        self.drawn.update(seen.drawn.tolist())
        self.n.update(seen.counts)
        present = batch.get("cls_weights", np.ones(len(real))) > 0
        for name in {"nsp_labels", "sop_labels"} & batch.keys():
            self.labels.update(map(str, batch[name][present].tolist()))

    def results(self) -> dict[str, Any]:
        """Return rates and counts by name; the `*_rate`s of masking are shares of the
        selected tokens, lengths count the tokens of sequences; packed rows hold
        several."""
        n = self.n
        selected = max(n["selected"], 1)
        sequences = self.lengths.total()
        return {
            "rows": n["rows"],
            "sequences": sequences,
            "tokens": n["tokens"],
            "fill": n["tokens"] / n["slots"],
            "segments_per_row": sequences / n["rows"],
            "sequence_tokens": quantiles(self.lengths),
            "selected_rate": n["selected"] / n["tokens"],
            "mask_rate": n["masked"] / selected,
            "random_rate": (n["selected"] - n["masked"] - n["kept"]) / selected,
            "keep_rate": n["kept"] / selected,
            "special_selected": n["special_selected"],
            "special_replacements": n["special_replacements"],
            "partial_words": n["partial_words"],
            "rows_without_predictions": n["idle"],
            "unit_lengths": {str(k): self.drawn[k] for k in sorted(self.drawn)},
            "unknown_rate": n["unknown"] / n["tokens"],
            "truncated": n["truncated"] / n["rows"],
            "pair_labels": {k: self.labels[k] for k in sorted(self.labels)},
            "components": {k: self.components[k] for k in self.names},
            **{name: count for name, count in n.items() if name not in COUNTS},
            "batch_sha256": self.hashes,
        }


def sequence_lengths(batch: Batch) -> np.ndarray:
    """Return the number of tokens of every sequence of a batch, i64 [sequences].

    >>> sequence_lengths({"attention_mask": np.array([[1, 1, 0], [1, 1, 1]])})
    array([2, 3])
    """
    if "segment_ids" not in batch:
        lengths = batch["attention_mask"].sum(axis=-1)
        return lengths[lengths > 0]  # rows of choices [b, C] may lack some
    ids = batch["segment_ids"]
    width = int(ids.max(initial=0)) + 1
    rows = np.arange(len(ids))[:, None] * width
    counts = np.bincount((ids + rows).ravel(), minlength=width * len(ids))
    counts = counts.reshape(-1, width)[:, 1:]
    return counts[counts > 0]


def quantiles(counted: Counter[int]) -> dict[str, float]:
    """Return the mean, minimum, median, 90th percentile and maximum.

    >>> quantiles(Counter({2: 1, 4: 3}))
    {'mean': 3.5, 'min': 2, 'median': 4, 'p90': 4, 'max': 4}
    """
    if not counted:
        return {}
    values = np.array(sorted(counted))
    total = np.cumsum([counted[v] for v in values])
    median, p90 = values[np.searchsorted(total, total[-1] * np.array([0.5, 0.9]))]
    mean = sum(v * k for v, k in counted.items()) / int(total[-1])
    whole = {"min": values[0], "median": median, "p90": p90, "max": values[-1]}
    return {"mean": mean} | {name: int(value) for name, value in whole.items()}
