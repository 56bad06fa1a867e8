# SPDX-License-Identifier: Apache-2.0
"""Span corruption: an encoder reads a text with gaps, a decoder predicts the gaps.

Raffel et al. 2020 (T5), section 3.1.4; spans follow random_spans_noise_mask of
google-research/text-to-text-transfer-transformer, t5/data/preprocessors.py.
"""

import numpy as np

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.features import base
from bertjax.data.features.base import Batch, Settings
from bertjax.data.features.encoder_decoder import (
    EncoderDecoderFeatures,
    Layout,
    Sequences,
    Side,
    count_chosen,
    find_sequences,
    is_frame,
    make_side,
)
from bertjax.data.masking.choose import choose_subsets
from bertjax.data.ragged import ramps


class SpansFeatures(EncoderDecoderFeatures):
    """The encoder reads a text in which sentinels replace some spans; the decoder
    predicts the spans, each after its sentinel.

    Of n tokens round(density n) are noise, at least 1 and at most n - 1, in
    round(noise / mean) spans, at least 1; a text of one token has none. Noise tokens
    and kept tokens are each split into that many pieces, every split equally likely;
    the pieces alternate, a kept piece first. Sentinels are <extra_id_0>,
    <extra_id_1>, ... (Tokenizer.sentinel_ids).

    As in T5, rows have no [CLS], end with [SEP] on both sides, and have no separators
    between the documents of a row; the decoder starts with [PAD]. An unknown piece is
    hidden like any other, and never predicted. With 512 slots a text has at most 568
    tokens, and its spans occupy 114 slots: both sizes are functions of the number of
    tokens, so that packed rows are filled exactly. With 2 of 8 tokens as noise, in 2
    spans (99 is <extra_id_0>, 98 <extra_id_1>):

        gathered            2 17 25 31 46 50 61 72 80  3
        input_ids          17 25 99 46 50 61 72 98  3       without 31 and 80
        decoder_input_ids   0 99 31 98 80
        lm_ids             99 31 98 80  3

    density, mean: if they have several values, "0.15/0.5" and "3/8", each text draws
    one pair of them, as in UL2 (Tay et al. 2022, section 3.1). A single span is always
    at the end of its text.
    """

    def __init__(
        self, settings: Settings, density: str = "0.15", mean: str = "3"
    ) -> None:
        super().__init__(settings)
        self.density, self.mean = _read_laws(density, mean)
        self.sentinels = np.asarray(settings.tokenizer.sentinel_ids, np.int32)
        n = np.arange(1, int(self.length / (1 - self.density.max())) + 3)
        fits = self._sizes(n)[0] <= self.length
        self.text = int(n[fits].max())
        most = np.arange(self.text + 1)
        self.target = int(self._sizes(most)[1].max())
        spans = int(self._counts(most)[1].max())
        if spans > len(self.sentinels):
            has = f"{len(self.sentinels)} of them" if len(self.sentinels) else "none"
            raise UserError(
                f"data.length={self.length}: a text has up to {spans} spans, in the "
                "place of each a sentinel (<extra_id_0>, ...), and the vocabulary has "
                f"{has}: give data.extra_ids={max(spans, 100)}"
            )

    @property
    def raw(self) -> int:
        return self.text + 2

    @property
    def start_id(self) -> int:
        return self.tokenizer.pad_id

    def slots(self, tokens: np.ndarray) -> np.ndarray:
        read, written = self._sizes(np.maximum(tokens - 2, 0))
        read = -(-read * self.raw // self.length)
        return np.maximum(
            tokens, np.maximum(read, -(-written * self.raw // self.target))
        )

    def _counts(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return noise and spans for each number of tokens, i64 [laws, n].

        A law is a pair of density and mean.
        """
        return span_counts(tokens, self.density[:, None], self.mean[:, None])

    def _sizes(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the most slots of input and target that these tokens occupy, [n]."""
        noise, spans = self._counts(tokens)
        read, written = tokens - noise + spans + 1, noise + spans + 1
        return read.max(axis=0), written.max(axis=0)

    def make_block(
        self, arrays: Batch, keys: np.ndarray, drawn: list[np.ndarray] | None = None
    ) -> tuple[Side, Side]:
        s = find_sequences(arrays, keys, "spans")
        is_text, tokens = self._text(arrays, s)
        spans, kept, hidden = self._draw(s, tokens)
        if drawn is not None:
            drawn.append(hidden)
        # A piece ends with a sentinel, or with the end token, on both sides. Piece k
        # of the target holds span k - 1; piece k of the input holds the tokens that
        # are kept after that span.
        of, number = np.repeat(np.arange(len(spans)), spans + 1), ramps(spans + 1)
        is_last = number == spans[of]
        ends = self.sentinels.take(number, mode="clip")
        ends[is_last] = self.end_id
        written, read = np.zeros((2, len(of)), np.int64)
        written[number > 0] = hidden
        read[~is_last] = kept
        alone = is_last & (number == 0)
        read[alone] = tokens[of[alone]]
        begin = np.cumsum(written + read) - read - written
        text = np.append(arrays["input_ids"][is_text], np.int32(self.tokenizer.pad_id))

        def lay_out(start: np.ndarray, size: np.ndarray, width: int) -> Side:
            layout = Layout(size + 1, s.row[of], (len(keys), width))
            ids, first = layout.take(text, start), np.flatnonzero(number == 0)
            ids.reshape(-1)[layout.at + size] = ends
            return make_side(layout, ids, s, of, first, "segment_ids" in arrays)

        inputs = lay_out(begin + written, read, self.length)
        return inputs, lay_out(begin, written, self.target)

    def _text(self, arrays: Batch, s: Sequences) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that are text, bool [b, raw], and their number per text."""
        is_text = ~is_frame(arrays, self.end_id)
        is_text &= arrays["attention_mask"] > 0
        return is_text, count_chosen(arrays, s, is_text)

    def _draw(
        self, s: Sequences, tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the number of spans of each text, i64 [s], and for each span the
        tokens kept before it and the tokens hidden in it, i64 [all spans]."""
        law = np.zeros(len(tokens), int)
        if len(self.density) > 1:
            law = counter_rng.below(
                counter_rng.fold(s.keys, "law"), 0, len(self.density)
            )
        noise, spans = span_counts(tokens, self.density[law], self.mean[law])
        sizes = (
            random_parts(counter_rng.fold(s.keys, name), items, spans)
            for name, items in (("kept", tokens - noise), ("hidden", noise))
        )
        return spans, *sizes

    def describe(self) -> str:
        laws = zip(self.density, self.mean, strict=True)
        each = " or ".join(
            f"{base.percent(share)} in spans of {mean:g}" for share, mean in laws
        )
        return f"{each} predicted, {self.target} slots for {self.text} tokens of text"

    def count(self, before: Batch, after: Batch) -> dict[str, float]:
        """Count spans, and what became of the tokens in them."""
        arrays = {k: v for k, v in before.items() if k not in ("keys", "marks")}
        s = find_sequences(arrays, before["keys"], "spans")
        is_text, tokens = self._text(arrays, s)
        spans, kept, hidden = self._draw(s, tokens)
        turns = np.stack([kept, hidden], axis=1).ravel()
        is_hidden = np.zeros(int(tokens.sum()), bool)
        in_spans = np.repeat(np.arange(len(turns)) % 2 > 0, turns)
        is_hidden[np.repeat(spans > 0, tokens)] = in_spans
        chosen = np.zeros(is_text.shape, bool)
        chosen[is_text] = is_hidden
        ids = np.where(chosen, self.tokenizer.mask_id, before["input_ids"])
        counts = base.count_masks(self.tokenizer, before, ids, chosen)
        # Unknown pieces are text and may be in spans; do not count them as special.
        unknown = before["input_ids"][chosen] == self.tokenizer.unk_id
        counts["special_selected"] -= int(unknown.sum())
        return {
            **counts,
            "spans": int(spans.sum()),
            "target_tokens": int(after["decoder_attention_mask"].sum()),
        }

    def predicted(self, batch: Batch) -> np.ndarray:
        return np.isin(batch["input_ids"], self.sentinels)


def span_counts(
    tokens: np.ndarray, density: np.ndarray, mean: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of noise tokens and the number of spans for `tokens`, i64.

    Both are rounded half to even, in float32, as in T5's code.

    >>> noise, spans = span_counts(np.array([1, 8, 568]), np.float32(0.15), 3)
    >>> noise.tolist(), spans.tolist()
    ([0, 1, 85], [0, 1, 28])
    """
    noise = np.rint(tokens.astype(np.float32) * density)
    noise = np.minimum(np.maximum(noise, 1), tokens - 1)
    spans = np.maximum(np.rint(noise.astype(np.float32) / mean), 1)
    spans = np.minimum(spans, np.minimum(noise, tokens - noise))
    some = tokens > 1
    return (noise * some).astype(np.int64), (spans * some).astype(np.int64)


def random_parts(keys: np.ndarray, items: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Split `items` under each key into `parts` parts; every split is equally likely.

    keys u64 [s]; items, parts i64 [s], parts <= items; both may be 0. Each part has at
    least one item. Returns the sizes, i64 [sum of parts], key after key.

    Worked example: 5 items in 3 parts, cut after the first and the fourth: [1, 3, 1].
    """
    ends = np.empty(int(parts.sum()), np.int64)
    last = (np.cumsum(parts) - 1)[parts > 0]
    is_cut = np.ones(len(ends), bool)
    is_cut[last] = False
    ends[last] = items[parts > 0]
    total = np.maximum(items - 1, 0)
    ends[is_cut] = 1 + choose_subsets(keys, total, np.maximum(parts - 1, 0))
    sizes = np.diff(ends, prepend=0)
    sizes[last[:-1] + 1] = ends[last[:-1] + 1]
    return sizes


def _read_laws(density: str, mean: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the options, f32 [laws] each. Raises UserError."""
    where = f"objective: spans of density={density} and mean={mean}"
    try:
        laws = [np.array(text.split("/"), np.float32) for text in (density, mean)]
    except ValueError:
        raise UserError(f"{where} are not numbers, or numbers with / between") from None
    if len(laws[0]) != len(laws[1]):
        raise UserError(f"{where}: give as many means as densities")
    if not ((laws[0] > 0) & (laws[0] < 1) & (laws[1] >= 1)).all():
        raise UserError(f"{where}: a density is between 0 and 1, a mean 1 or more")
    return laws[0], laws[1]


make_features = SpansFeatures
