# SPDX-License-Identifier: Apache-2.0
"""Count over batches what plan and masking did."""

from collections import Counter
from typing import Any

import numpy as np

from bertjax.data.batches import Batch, Inspected
from bertjax.data.token_flags import BEGINS_WORD

# Of `results`, what is said of masked text alone.
OF_TEXT = "selected_rate mask_rate random_rate keep_rate special_selected"
OF_TEXT += " special_replacements partial_words rows_without_predictions unit_lengths"
OF_TEXT = (*f"{OF_TEXT} pair_labels".split(),)


class Statistics:
    """Counts over batches; `results` are what `show --json` prints."""

    def __init__(self, tokenizer: Any, names: tuple[str, ...]) -> None:
        self.tokenizer, self.names = tokenizer, names
        self.special = np.zeros(tokenizer.vocab_size, bool)
        self.special[tokenizer.special_ids] = True
        self.n: Counter[str] = Counter()
        self.labels: Counter[str] = Counter()
        self.lengths: Counter[int] = Counter()  # of sequences, in tokens
        self.drawn: Counter[int] = Counter()  # of what was chosen as one, in units
        self.components: Counter[str] = Counter()
        self.hashes: list[str] = []

    def add(self, seen: Inspected, sha256: str) -> None:
        """Count a batch."""
        n, batch, before = self.n, seen.batch, seen.gathered
        real = batch["attention_mask"] > 0
        self.hashes.append(sha256)
        n["rows"] += len(real)
        n["slots"] += real.size
        n["tokens"] += int(real.sum())
        n["truncated"] += int((seen.truncated > 0).sum())
        n["unknown"] += int((before["input_ids"][real] == self.tokenizer.unk_id).sum())
        self.components.update(self.names[k] for k in seen.located.component)
        self.lengths.update(sequence_lengths(batch).tolist())
        self.drawn.update(seen.drawn.tolist())
        if "mlm_ids" in batch:
            self._count_masks(before, batch, real)
        present = batch.get("cls_weights", np.ones(len(real))) > 0
        for name in {"nsp_labels", "sop_labels"} & batch.keys():
            self.labels.update(map(str, batch[name][present].tolist()))

    def _count_masks(self, before: Batch, batch: Batch, real: np.ndarray) -> None:
        n = self.n
        chosen = batch["mlm_weights"] > 0
        row = np.nonzero(chosen)[0]
        at, true = batch["mlm_positions"][chosen], batch["mlm_ids"][chosen]
        seen = batch["input_ids"][row, at]
        masked, kept = seen == self.tokenizer.mask_id, seen == true
        drawn = ~masked & ~kept
        n["selected"] += true.size
        n["idle"] += int((~chosen.any(axis=1)).sum())
        n["masked"] += int(masked.sum())
        n["kept"] += int(kept.sum())
        n["special_selected"] += int(self.special[true].sum())
        n["special_replacements"] += int(self.special[seen[drawn]].sum())
        ids = before["input_ids"]
        chosen_at = np.zeros(ids.shape, bool)
        chosen_at[row, at] = True
        # Words are numbered: a special token is one, and behind it one begins.
        alone, marks = self.special[ids], before.get("marks")
        starts = (
            self.tokenizer.word_starts[ids] if marks is None else marks & BEGINS_WORD
        )
        starts = (starts > 0) | alone
        starts[:, 1:] |= alone[:, :-1]
        starts[:, 0] = True
        words = np.cumsum(starts.ravel()).reshape(ids.shape) - 1
        pieces = np.bincount(words[real], minlength=words[-1, -1] + 1)
        taken = np.bincount(words[real & chosen_at], minlength=len(pieces))
        n["partial_words"] += int(((taken > 0) & (taken < pieces)).sum())

    def results(self) -> dict[str, Any]:
        """Return rates and counts by name; `*_rate`s of masking are shares of what was
        selected, lengths are of the sequences' tokens; packed rows hold several."""
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
            "batch_sha256": self.hashes,
        }


def sequence_lengths(batch: Batch) -> np.ndarray:
    """Return the tokens of every sequence of a batch, i64 [sequences].

    >>> sequence_lengths({"attention_mask": np.array([[1, 1, 0], [1, 1, 1]])})
    array([2, 3])
    """
    if "segment_ids" not in batch:
        lengths = batch["attention_mask"].sum(axis=-1)
        return lengths[lengths > 0]  # of choices [b, C], those that are there
    ids = batch["segment_ids"]
    width = int(ids.max(initial=0)) + 1
    rows = np.arange(len(ids))[:, None] * width
    counts = np.bincount((ids + rows).ravel(), minlength=width * len(ids))
    counts = counts.reshape(-1, width)[:, 1:]
    return counts[counts > 0]


def quantiles(counted: Counter[int]) -> dict[str, float]:
    """Return mean, smallest, median, the one that 90% do not pass, and largest.

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
