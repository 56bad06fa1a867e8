# SPDX-License-Identifier: Apache-2.0
"""What host halves of encoder-decoders share: two sides of a row, a layout of pieces.

The encoder reads `input_ids` [b, L]; the decoder predicts `lm_ids` [b, T] and reads
`decoder_input_ids`: lm_ids shifted to the right, after a token that starts every text.
Packed rows number their texts in the same way on both sides.
"""

from typing import Any, NamedTuple

import numpy as np

from bertjax.data import counter_rng
from bertjax.data.features import base
from bertjax.data.features.base import Batch, GatheredRows, Spec, Specs
from bertjax.data.ragged import ramps

BLOCK = 1 << 16  # tokens whose rows are created at a time: they fit in the cache


class Sequences(NamedTuple):
    """The texts of some rows in order, [s] each: the row, the number of the text in its
    row from 0, and a key."""

    row: np.ndarray
    nth: np.ndarray
    keys: np.ndarray


def find_sequences(arrays: Batch, keys: np.ndarray, name: str) -> Sequences:
    """Return the texts of rows; unpacked rows have one each. `name` enters the keys."""
    segments = arrays.get("segment_ids")
    b = len(keys)
    count = np.ones(b, int) if segments is None else np.maximum(segments.max(axis=1), 1)
    row, nth = np.repeat(np.arange(b), count), ramps(count)
    return Sequences(row, nth, counter_rng.fold(keys[row], name, nth))


def count_chosen(arrays: Batch, s: Sequences, chosen: np.ndarray) -> np.ndarray:
    """Count the chosen tokens, bool [b, R], of each text of rows: i64 [s]."""
    if "segment_ids" not in arrays:
        return np.count_nonzero(chosen, axis=1)
    first = np.flatnonzero(s.nth == 0)
    number = arrays["segment_ids"] + first[:, None] - 1
    return np.bincount(number[chosen], minlength=len(s.row))


def is_frame(arrays: Batch, sep_id: int) -> np.ndarray:
    """Return which tokens a plan put around texts, bool [b, R]: the first token of each
    text, and separators."""
    ids = arrays["input_ids"]
    frame = ids == sep_id
    frame[:, 0] = True
    if "position_ids" in arrays:
        frame |= (arrays["position_ids"] == 0) & (arrays["attention_mask"] > 0)
    return frame


class Layout:
    """The places of pieces that fill rows [b, W] one after the other.

    size i64 [p]: the slots of each piece, in order; row i64 [p], non-decreasing. `at`
    i64 [p] is the first slot of each piece, counted from the start of the first row;
    `real` bool [b, W] is true where a piece is.
    """

    def __init__(self, size: np.ndarray, row: np.ndarray, shape: tuple[int, int]):
        b, width = shape
        used = np.bincount(row, size, minlength=b).astype(np.int64)
        self.shape, self.at = shape, np.cumsum(size) - size
        self.at += row * width - (np.cumsum(used) - used)[row]
        # The last piece of a row also covers the padding.
        self.count = np.diff(self.at, append=b * width)
        self.real = np.arange(width) < used[:, None]

    def take(self, values: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Copy flat values into the rows: each piece has those from its `start` on."""
        source = np.repeat(start - self.at, self.count)
        source += np.arange(source.size)
        return values.take(source, mode="clip").reshape(self.shape)

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Return in each slot the value of its piece, i32 [b, W]; 0 in padding."""
        each = np.repeat(values.astype(np.int32), self.count).reshape(self.shape)
        each *= self.real
        return each


class Side(NamedTuple):
    """One side of rows: ids i32 [b, W], 0 or pad where not `real` bool [b, W]. Packed
    rows also have the number of each token's text and its place there, i32 [b, W]."""

    ids: np.ndarray
    real: np.ndarray
    segments: np.ndarray | None = None
    places: np.ndarray | None = None


class EncoderDecoderFeatures(base.Features):
    """Rows with a separate target. A subclass sets `target`, which is T, and implements
    `make_block`."""

    target: int
    packed: bool = False

    def __init__(self, settings: base.Settings) -> None:
        super().__init__(settings)
        self.streams = frozenset()  # both sides are texts of their own
        self.unk_id, self.end_id = self.tokenizer.unk_id, self.tokenizer.sep_id

    def specs(self, gathered: Specs) -> dict[str, Spec]:
        row, target = Spec((self.length,)), Spec((self.target,))
        names = ["input_ids", "attention_mask"]
        names += [n for n in ("segment_ids", "position_ids") if n in gathered]
        specs = dict.fromkeys(names, row)
        specs |= {f"decoder_{name}": target for name in names}
        weights = Spec(target.shape, "float32", loss=True)
        return specs | {
            "lm_ids": target,
            "lm_weights": weights,
            "text_tokens": Spec(()),
        }

    def make(self, rows: GatheredRows, drawn: list[np.ndarray] | None = None) -> Batch:
        step = max(1, BLOCK // self.raw)
        blocks = []
        for low in range(0, len(rows.keys), step):
            part = slice(low, low + step)
            arrays = {name: values[part] for name, values in rows.arrays.items()}
            inputs, targets = self.make_block(arrays, rows.keys[part], drawn)
            text = arrays["attention_mask"].sum(axis=1, dtype=np.int32)
            blocks.append(self.join(inputs, targets) | {"text_tokens": text})
        if len(blocks) == 1:
            return blocks[0]
        return {name: np.concatenate([b[name] for b in blocks]) for name in blocks[0]}

    def make_block(
        self, arrays: Batch, keys: np.ndarray, drawn: list[np.ndarray] | None
    ) -> tuple[Side, Side]:
        """Create both sides of gathered rows, [b, L] and [b, T]."""
        raise NotImplementedError

    @property
    def start_id(self) -> int:
        """The id that the decoder reads before each text (decoder_start_token_id)."""
        raise NotImplementedError

    def join(self, inputs: Side, targets: Side) -> Batch:
        """Join both sides into the arrays of a batch.

        An unknown piece is never predicted.

            lm_ids              31 98 80  3
            decoder_input_ids    0 31 98 80
            lm_weights           1  1  1  1
        """
        ids, real = targets.ids, targets.real
        before = np.empty_like(ids)
        before[:, 0] = self.start_id
        before[:, 1:] = ids[:, :-1]
        if targets.places is not None:
            np.copyto(before, np.int32(self.start_id), where=targets.places == 0)
        weights = (real & ((ids != self.unk_id) | (ids == self.end_id))).astype("f4")
        lm_ids = ids * real
        for side in (inputs.ids, before):
            own = inputs.real if side is inputs.ids else real
            np.copyto(side, np.int32(self.tokenizer.pad_id), where=~own)
        batch = {
            "input_ids": inputs.ids,
            "attention_mask": inputs.real.astype(np.int32),
            "decoder_input_ids": before,
            "decoder_attention_mask": real.astype(np.int32),
            "lm_ids": lm_ids,
            "lm_weights": weights,
        }
        for prefix, side in (("", inputs), ("decoder_", targets)):
            if side.segments is not None:
                batch[f"{prefix}segment_ids"] = side.segments
                batch[f"{prefix}position_ids"] = side.places
        return batch

    def origin(self, batch: Batch) -> None:
        """Return None: slots do not correspond to single tokens of the row."""
        return None


def make_side(
    layout: Layout, ids: np.ndarray, s: Sequences, of: Any, first: Any, packed: bool
) -> Side:
    """Create a side of ids [b, W] whose pieces belong to the texts `of`; first: the
    first piece of each text."""
    if not packed:
        return Side(ids, layout.real)
    slots = np.arange(np.prod(layout.shape), dtype=np.int32).reshape(layout.shape)
    places = slots - layout.spread(layout.at[first][of])
    segments = layout.spread((s.nth + 1)[of])
    return Side(ids, layout.real, segments, places * layout.real)
