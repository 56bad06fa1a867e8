# SPDX-License-Identifier: Apache-2.0
"""Denoising: an encoder reads a corrupted text, a decoder predicts the original.

Lewis et al. 2020 (BART), section 2.2; the operations are those of fairseq,
fairseq/data/denoising_dataset.py. noise_operations.py defines each of them.
"""

from collections import Counter

import numpy as np

from bertjax import UserError
from bertjax.data.features import base
from bertjax.data.features.base import Batch, Settings
from bertjax.data.features.encoder_decoder import (
    EncoderDecoderFeatures,
    Layout,
    Side,
    count_chosen,
    find_sequences,
    is_frame,
    make_side,
)
from bertjax.data.features.noise_operations import read_noise
from bertjax.data.features.noise_texts import (
    BEGINS_UNIT,
    ENDS_SENTENCE,
    FRAME,
    FREE,
    IDS,
    Corruption,
    Text,
)
from bertjax.data.masking.presets import REPLACEMENTS
from bertjax.data.token_flags import BEGINS_WORD, SPECIAL
from bertjax.registry import pick

UNITS = {"token": False, "word": True}


class NoiseFeatures(EncoderDecoderFeatures):
    """The encoder reads a corrupted text; the decoder predicts the whole original text.

    data.noise lists the operations, in order; data.mask_unit states whether words or
    tokens are chosen (default "token"), data.replacement how random pieces are drawn.
    Special tokens keep their places and are neither chosen nor drawn. As in BART, the
    decoder starts with [SEP] and predicts [CLS] too (decoder_start_token_id of
    transformers is </s>); T = L. A text never becomes longer, except by the tokens of
    `insert`, for which rows leave room. An example (2 = <s>, 3 = </s>, 4 = mask) in
    which sentences are permuted before two spans become a mask each:

        gathered            2 17 25 31 46 50 61  3
        permuted            2 46 50 61 17 25 31  3
        input_ids           2 46  4 17  4 31  3  0
        decoder_input_ids   3  2 17 25 31 46 50 61
        lm_ids              2 17 25 31 46 50 61  3
    """

    keys = frozenset({"noise", "mask_unit", "replacement"})

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        data, tables = settings.config.data, settings.tables
        self.operations = read_noise(data.noise)
        if any(operation.needs_mask for operation in self.operations):
            base.check_mask(settings)
        self.by_words = pick("data.mask_unit", data.mask_unit or "token", UNITS)
        how = pick("data.replacement", data.replacement or "uniform", REPLACEMENTS)
        if how == "unigram" and tables.unigram is None:
            raise UserError("data.replacement=unigram needs the counts of a text")
        self.unigram = tables.unigram if how == "unigram" else None
        self.replacements = tables.replacement_ids
        self.target = self.length
        tokens = np.arange(1, self.length + 1)
        fits = self._grown(tokens) <= self.length
        self.text = int(tokens[fits].max(initial=0))
        if self.text < 3:
            raise UserError(
                f"data.noise={data.noise}: what is inserted leaves no room for text in "
                f"data.length={self.length}"
            )
        bits = np.where(tables.flags & SPECIAL, 0, FREE).astype(np.int32)
        bits |= np.where(tables.flags & BEGINS_WORD, BEGINS_UNIT, 0)
        ends = np.asarray(settings.tokenizer.sentence_ends)
        bits |= np.where(ends, ENDS_SENTENCE, 0)
        self.codes = bits | np.arange(len(bits), dtype=np.int32)

    @property
    def raw(self) -> int:
        return self.text

    @property
    def start_id(self) -> int:
        return self.tokenizer.sep_id

    def _grown(self, tokens: np.ndarray) -> np.ndarray:
        for operation in self.operations:
            tokens = tokens + operation.added(tokens)
        return tokens

    def slots(self, tokens: np.ndarray) -> np.ndarray:
        return np.maximum(tokens, -(-self._grown(tokens) * self.raw // self.length))

    def make_block(
        self, arrays: Batch, keys: np.ndarray, drawn: list[np.ndarray] | None = None
    ) -> tuple[Side, Side]:
        text = self._corrupt(arrays, keys, drawn, Counter())
        s = find_sequences(arrays, keys, "noise")
        layout = Layout(text.size, s.row, (len(keys), self.length))
        first = np.cumsum(text.size) - text.size
        ids, every = layout.take(text.codes & IDS, first), np.arange(len(s.row))
        inputs = make_side(layout, ids, s, every, every, "segment_ids" in arrays)
        return inputs, self._targets(arrays)

    def _targets(self, arrays: Batch) -> Side:
        """Return the rows as they were gathered, [b, T]."""
        more = ((0, 0), (0, self.target - self.raw))
        ids, real, *numbers = (
            np.pad(arrays[name], more)
            for name in ("input_ids", "attention_mask", "segment_ids", "position_ids")
            if name in arrays
        )
        return Side(ids, real > 0, *numbers)

    def _corrupt(
        self,
        arrays: Batch,
        keys: np.ndarray,
        drawn: list[np.ndarray] | None,
        counts: Counter[str],
    ) -> Text:
        s = find_sequences(arrays, keys, "noise")
        real = arrays["attention_mask"] > 0
        real[:, 0] = True
        codes = self.codes.take(arrays["input_ids"])
        codes[is_frame(arrays, self.end_id)] |= FRAME
        codes = codes[real]
        if (marks := arrays.get("marks")) is not None:
            codes &= ~BEGINS_UNIT
            codes |= np.where(marks[real] & BEGINS_WORD, BEGINS_UNIT, 0)
        codes &= np.where(codes & FRAME, ~FREE, -1)
        if not self.by_words:
            codes |= BEGINS_UNIT
        how = Corruption(
            self.tokenizer.mask_id, self.replacements, self.unigram, counts, drawn
        )
        text = Text(codes, count_chosen(arrays, s, real))
        for number, operation in enumerate(self.operations):
            text = operation.apply(text, s.keys, number, how)
        return text

    def describe(self) -> str:
        each = ", ".join(map(str, self.operations))
        return f"{each}: {self.text} tokens of text predicted"

    def count(self, before: Batch, after: Batch) -> dict[str, float]:
        """Count what each operation did, by applying it again."""
        counts: Counter[str] = Counter()
        arrays = {name: values for name, values in before.items() if name != "keys"}
        self._corrupt(arrays, before["keys"], None, counts)
        real = after["decoder_attention_mask"]
        # Padding has different ids on the two sides.
        same = (after["input_ids"] == after["lm_ids"]) | (real == 0)
        unchanged = (same & (after["attention_mask"] == real)).all(axis=1)
        return {
            **counts,
            "rows_unchanged": int(unchanged.sum()),
            "input_tokens": int(after["attention_mask"].sum()),
            "target_tokens": int(after["decoder_attention_mask"].sum()),
        }

    def predicted(self, batch: Batch) -> np.ndarray:
        return batch["input_ids"] == self.tokenizer.mask_id


make_features = NoiseFeatures
