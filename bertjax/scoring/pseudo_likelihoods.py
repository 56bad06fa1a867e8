# SPDX-License-Identifier: Apache-2.0
"""Compute pseudo-log-likelihoods: the sum of ln p of each token hidden alone.

Salazar et al. 2020. The variant "within_word" also hides the later pieces of the
token's word (PLL-word-l2r of Kauf and Ivanova 2023), so that long words whose end
reveals their beginning do not seem likely.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError, registry
from bertjax.data.progress import Progress
from bertjax.inference import fill_blanks

VARIANTS = dict.fromkeys(("original", "within_word"))
LENGTHS = 8  # the most programs to compile
ROWS, TOKENS = 256, 8192  # the most rows, and padded tokens, at once


def pick_variant(name: str | None) -> str:
    """Return what to hide besides a token; by default nothing."""
    registry.pick("--variant", name or "original", VARIANTS)
    return name or "original"


class Score(NamedTuple):
    """A text's score in nats; None if the text is too long or has no token."""

    score: float | None
    tokens: int  # without special ones around it
    words: int  # as whole-word masking counts them
    unknown: int  # tokens that are the unknown token


def score_texts(
    cfg: Any,
    tokenizer: Any,
    texts: Sequence[str],
    score: Callable[[Sequence[Sequence[int]]], list[float]],
) -> list[Score]:
    """Score each text as [CLS] text [SEP], independently of the others.

    Texts with the same tokens get bit-identical scores. Special tokens written in a
    text are plain text. score: from `make_scorer` or an alternative. Raises UserError
    for a model that returns NaN.
    """
    encoded = [tuple(ids) for ids in tokenizer.encode_batch(list(texts))]
    fitting = [ids for ids in encoded if 0 < len(ids) <= cfg.max_length - 2]
    # Score each text once: minimal pairs share sentences, and equal texts must tie.
    distinct = list(dict.fromkeys(fitting))
    known = dict(zip(distinct, score(distinct), strict=True))
    if not np.isfinite([*known.values()]).all():
        raise UserError("the model's probabilities are not finite (NaN)")
    return [
        Score(
            known.get(ids),
            len(ids),
            int(find_words(ids, tokenizer.word_starts).max(initial=0)),
            ids.count(tokenizer.unk_id),
        )
        for ids in encoded
    ]


def find_words(ids: Sequence[int], starts: np.ndarray) -> np.ndarray:
    """Number each token's word from 1; `starts` [V]: which tokens begin a word.

    >>> find_words([7, 8, 7], starts)  # 8 is a ##piece
    array([1, 1, 2])
    """
    begins = starts[np.array(ids, np.int64)]
    begins[:1] = True
    return np.cumsum(begins)


def make_scorer(
    cfg: Any,
    params: Any,
    tokenizer: Any,
    variant: str,
    batch_size: int | None = None,
    before: bool = False,
) -> Callable[[Sequence[Sequence[int]]], list[float]]:
    """Build score(texts of ids, without special ones) -> their scores.

    There is one row per token, padded to one of a few lengths. The last layer and the
    head are computed only at the hidden token or, with `before`, at the position before
    it, where masked next-token prediction predicts it. batch_size: the most rows at
    once, by default a fast number.
    """
    from bertjax.inference import forward  # needs jax

    params, cfg = fill_blanks.masked_lm(params, cfg)
    params = forward.place_params(params, cfg)
    run = functools.partial(forward.make_forward(cfg, forward.log_likelihoods), params)

    def score(texts: Sequence[Sequence[int]]) -> list[float]:
        totals = np.zeros(len(texts))
        sizes = np.array([len(ids) + 2 for ids in texts], np.int32)
        rows = int((sizes - 2).sum())
        with Progress("score", rows, "tokens", count_work(sizes)) as progress:
            parts = batches(texts, tokenizer, variant, batch_size, before)
            for which, values in forward.run_batches(parts, run, progress):
                np.add.at(totals, which, values)
        return totals.tolist()

    return score


def batches(
    texts: Sequence[Sequence[int]],
    tokenizer: Any,
    variant: str,
    batch_size: int | None = None,
    before: bool = False,
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Yield (index of the text [n], batch) with a row for each token of each text, i32.

    batch: input_ids [R, L], sizes [R], mlm_positions [R, 1] (the hidden position, or
    the one before it), and truth [R], the hidden token; rows from n on are repetitions.

    Worked example: the text 10 11 12, whose 12 continues the word of 11 (cls 2, sep 3,
    mask 4). within_word has the rows 2 4 11 12 3, 2 10 4 4 3 and 2 10 11 4 3.
    """
    sizes = np.array([len(ids) + 2 for ids in texts], np.int32)
    tops = np.array(choose_lengths(sizes, LENGTHS))
    bucket = np.searchsorted(tops, sizes)
    for i, length in enumerate(tops.tolist()):
        mine = np.flatnonzero(bucket == i)
        ids = np.full((len(mine), length), tokenizer.pad_id, np.int32)
        words = np.zeros((len(mine), length), np.int32)
        for row, numbers, k in zip(ids, words, mine, strict=True):
            row[: sizes[k]] = [tokenizer.cls_id, *texts[k], tokenizer.sep_id]
            each = np.arange(1, sizes[k] - 1)
            if variant == "within_word":
                each = find_words(texts[k], tokenizer.word_starts)
            numbers[1 : sizes[k] - 1] = each
        text = np.repeat(np.arange(len(mine)), sizes[mine] - 2)
        at = np.nonzero(words)[1].astype(np.int32)
        # Use parts of equal size, because a padded last part costs
        # as much as the others.
        parts = -(-len(text) // (batch_size or max(1, min(ROWS, TOKENS // length))))
        rows = -(-len(text) // parts)
        for begin in range(0, len(text), rows):
            part = np.minimum(np.arange(begin, begin + rows), len(text) - 1)
            which, here = text[part], at[part][:, None]
            own = np.take_along_axis(words[which], here, 1)
            hidden = (words[which] == own) & (np.arange(length) >= here)
            yield (
                mine[which[: len(text) - begin]],
                {
                    "input_ids": np.where(
                        hidden, np.int32(tokenizer.mask_id), ids[which]
                    ),
                    "sizes": sizes[mine[which]],
                    "mlm_positions": here - before,
                    "truth": np.take_along_axis(ids[which], here, 1)[:, 0],
                },
            )


def count_work(sizes: np.ndarray) -> int:
    """Return the padded tokens of all rows of texts of these sizes, i32 [n]."""
    tops = np.array(choose_lengths(sizes, LENGTHS))
    return int(((sizes - 2) * tops[np.searchsorted(tops, sizes)].astype(int)).sum())


def choose_lengths(sizes: np.ndarray, most: int) -> list[int]:
    """Choose at most `most` lengths to pad rows to, so that padding is minimal.

    sizes: of texts, i32 [n]; a text has one row per token. Uses dynamic programming
    over the next smaller length.

    >>> choose_lengths(np.array([5, 5, 6, 30]), 2)
    [6, 30]
    """
    known, count = np.unique(sizes, return_counts=True)
    rows = np.cumsum(np.append(0, count * known))
    # the cost of padding the first j sizes
    least = np.append(0.0, np.full(len(known), np.inf))
    steps = []
    for _ in range(min(most, len(known))):
        # [i, j]: sizes i to j - 1 are padded to the last of them
        cost = least[:, None] + (rows[None, 1:] - rows[:, None]) * known
        cost[np.tril_indices(len(known) + 1, -1, len(known))] = np.inf
        steps.append(cost.argmin(axis=0))
        least = np.append(0.0, cost.min(axis=0))
    chosen, j = [], len(known)
    for step in reversed(steps):
        if j:
            chosen.append(int(known[j - 1]))
            j = int(step[j - 1])
    return chosen[::-1]
