# SPDX-License-Identifier: Apache-2.0
"""Compute pseudo-log-likelihoods of encoder-decoders.

The encoder reads a text without one token, and the decoder writes that token, in
analogy to encoders in pseudo_likelihoods.py (Salazar et al. 2020). The form is what
each model was trained on. T5 reads a sentinel in the token's place, and writes the
token after that sentinel. BART reads a mask there, and writes the whole text; its
decoder has already read the tokens before the hidden one.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bertjax.data.progress import Progress
from bertjax.inference import forward
from bertjax.models import decoder, heads
from bertjax.models.layers import take_at
from bertjax.scoring.pseudo_likelihoods import find_words

ROWS, TOKENS = 256, 8192  # the most rows, and padded tokens, at once


class Hiding(NamedTuple):
    """How a token is hidden; all values are ids.

    before, after: surround what the encoder reads. blank: replaces the token. start:
    the first input of the decoder. whole: whether the decoder writes the whole text,
    and has read the tokens before the hidden one.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    blank: int
    start: tuple[int, ...]
    whole: bool


class Rows(NamedTuple):
    """One row per token: inputs of encoder and decoder, and the token to write.

    The ids of a row are made on demand, because all rows of a long text have its length
    squared. texts: ids; text, at, end: i64 [n], the token's text, its position, and the
    end of what is hidden with it. truth: i32 [n].
    """

    texts: Sequence[Sequence[int]]
    how: Hiding
    text: np.ndarray
    at: np.ndarray
    end: np.ndarray
    truth: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """The number of ids that the encoder reads in each row, i64 [n]."""
        whole = np.array([*map(len, self.texts)], np.int64)[self.text]
        around = len(self.how.before) + len(self.how.after)
        return whole - (self.end - self.at) + 1 + around

    def read(self, k: int) -> list[int]:
        """Return the input of the encoder for a row."""
        how, ids = self.how, self.texts[self.text[k]]
        kept = *ids[: self.at[k]], how.blank, *ids[self.end[k] :]
        return [*how.before, *kept, *how.after]

    def written(self, k: int) -> list[int]:
        """Return the input of the decoder before it writes the token."""
        ids = self.texts[self.text[k]][: self.at[k]] if self.how.whole else ()
        return [*self.how.start, *ids]


def hiding(tokenizer: Any, spans: bool) -> Hiding:
    """Return how T5's models (spans) and BART's hide a token.

    Raises LookupError that names what the vocabulary lacks.
    """
    cls_id, sep_id = tokenizer.cls_id, tokenizer.sep_id
    if not spans:
        if not tokenizer.has_mask:
            raise LookupError("mask token")
        return Hiding((cls_id,), (sep_id,), tokenizer.mask_id, (sep_id, cls_id), True)
    if not len(tokenizer.sentinel_ids):
        raise LookupError("sentinel (<extra_id_0>)")
    first = int(tokenizer.sentinel_ids[0])
    return Hiding((), (sep_id,), first, (tokenizer.pad_id, first), False)


def make_rows(
    texts: Sequence[Sequence[int]], how: Hiding, starts: np.ndarray | None
) -> Rows:
    """Build a row for each token of texts of ids.

    starts: bool [V], which tokens begin a word; the same blank then also hides the
    later pieces of the token's word. None: only the token is hidden.

    Worked example: the text 10 11 12, whose 12 continues the word of 11, and its second
    row ([CLS] 2, [SEP] 3, [MASK] 4, <extra_id_0> 99, padding 0):

                    alone, T5     alone, BART     within_word, BART
        read        10 99 12 3    2 10 4 12 3     2 10 4 3
        written     0 99          3 2 10          3 2 10
        truth       11            11              11
    """
    places, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for ids in texts:
        own = np.arange(len(ids))
        words = own if starts is None else find_words(ids, starts)
        places.append(own)
        ends.append(np.searchsorted(words, words, side="right"))
    truth = np.array([*itertools.chain(*texts)], np.int32)
    which = np.repeat(np.arange(len(texts)), [*map(len, texts)])
    at, end = map(np.concatenate, (places, ends))
    return Rows(texts, how, which, at, end, truth)


@functools.lru_cache(maxsize=8)
def make_run(cfg: Any) -> Callable[[Any, Any], jax.Array]:
    """Build run(params, batch) -> ln p of `truth` after the written ids, f32 [B]."""

    @jax.jit
    def run(params: Any, batch: Any) -> jax.Array:
        memory = decoder.encode(params, cfg, batch)
        hidden = decoder.apply(params, cfg, batch, memory)
        last = take_at(hidden, batch["last"][:, None])[:, 0]
        word = params["encoder"]["embeddings"]["word"]
        return heads.log_likelihoods(
            params.get("mlm", {}), word, cfg, last, batch["truth"]
        )

    return run


def make_scorer(
    cfg: Any,
    params: Any,
    tokenizer: Any,
    how: Hiding,
    variant: str,
    batch_size: int | None = None,
) -> Callable[[Sequence[Sequence[int]]], list[float]]:
    """Build score(texts of ids, without special ones) -> their scores.

    params: the whole tree. batch_size: the most rows at once, by default a fast number.
    """
    starts = tokenizer.word_starts if variant == "within_word" else None
    run = functools.partial(make_run(cfg), forward.place_params(params, cfg))

    def score(texts: Sequence[Sequence[int]]) -> list[float]:
        totals = np.zeros(len(texts))
        if not len(texts):
            return totals.tolist()
        rows = make_rows(texts, how, starts)
        sizes = rows.sizes
        most = batch_size or max(1, min(ROWS, TOKENS // int(sizes.max())))
        count, planned = forward.plan_batches(sizes, most, cfg.max_length)
        work = forward.count_work(planned)
        batches = make_batches(rows, planned, count, tokenizer.pad_id)
        with Progress("score", len(sizes), "tokens", work) as progress:
            for which, values in forward.run_batches(batches, run, progress):
                np.add.at(totals, rows.text[which], values)
        return totals.tolist()

    return score


def make_batches(
    rows: Rows,
    planned: Sequence[tuple[np.ndarray, int]],
    count: int,
    pad_id: int,
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Yield (row indices, batch), as planned by `forward.plan_batches`.

    batch: input_ids, attention_mask i32 [B, L], decoder_input_ids i32 [B, T], and i32
    [B] truth and last, the position of the last token that the decoder has read. The
    positions after it are padding, to which no earlier token attends.
    """
    for which, length in planned:
        shape = count, length if rows.how.whole else len(rows.how.start)
        ids = np.full((count, length), pad_id, np.int32)
        written = np.full(shape, pad_id, np.int32)
        real = np.zeros_like(ids)
        last, truth = np.zeros((2, count), np.int32)
        real[len(which) :, 0] = 1  # filler rows also need a visible token
        truth[: len(which)] = rows.truth[which]
        for slot, k in enumerate(which):
            read, before = rows.read(k), rows.written(k)
            ids[slot, : len(read)], real[slot, : len(read)] = read, 1
            written[slot, : len(before)], last[slot] = before, len(before) - 1
        yield (
            which,
            {
                "input_ids": ids,
                "attention_mask": real,
                "decoder_input_ids": written,
                "last": last,
                "truth": truth,
            },
        )
