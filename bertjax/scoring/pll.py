# SPDX-License-Identifier: Apache-2.0
"""Pseudo-log-likelihoods: the sum of ln p of each token while it alone is hidden.

Salazar et al. 2020; "within_word" hides the later pieces of the token's own
word as well (PLL-word-l2r of Kauf and Ivanova 2023), so that long words whose end
tells their beginning are not taken for likely ones.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError, registry
from bertjax.assembly import models
from bertjax.data.corpus.line_files import FileSource
from bertjax.data.progress import Progress
from bertjax.inference import fill_blanks
from bertjax.scoring.lines import read_lines, total
from bertjax.scoring.scorer import Scores, identify, value_lines

FLAGS = ("variant",)
VARIANTS = dict.fromkeys(("original", "within_word"))
LENGTHS = 8  # programs at most
ROWS, TOKENS = 256, 8192  # most rows, and padded tokens, at once


def score(args: Any, path: str, flag: str) -> Scores:
    """Score each line of --text; an object a line, for people their totals."""
    variant = pick_variant(args.variant)
    if not args.text:
        raise UserError("--what=pll scores lines of text: give --text=FILES")
    lines = list(read_lines(args.text))
    if records := [line.file for line in lines if FileSource(line.file).is_json]:
        raise UserError(
            f"--text={records[0]} is JSON: --what=pll scores lines of plain text"
        )
    written = [line for line in lines if line.text.strip()]
    if not written:
        raise UserError(f"--text={args.text}: every line is empty")
    cfg, params, tokenizer, meta = open_masked_lm(args, path, flag)
    texts = [line.text for line in written]
    scores = score_texts(cfg, params, tokenizer, texts, variant, args.batch_size)
    about = identify(args, meta)
    rows = [
        {**about, "file": x.file, "line": x.number, "text": x.text, **score._asdict()}
        for x, score in zip(written, scores, strict=True)
    ]
    summary = total(rows)
    if not summary["lines"]:
        raise UserError(
            f"--text={args.text}: no line can be scored: {summary['too_long']:,} have "
            f"more than the model's {cfg.max_length - 2} tokens, "
            f"{summary['no_tokens']:,} none"
        )
    summary["empty_lines"] = len(lines) - len(written)
    note = "; ".join(f"{key} {value:,.6g}" for key, value in summary.items())
    return Scores(rows, [*value_lines(summary)], [note])


def pick_variant(name: str | None) -> str:
    """Return what to hide beside a token: nothing unless `name` says otherwise."""
    registry.pick("--variant", name or "original", VARIANTS)
    return name or "original"


def open_masked_lm(args: Any, path: str, flag: str) -> tuple[Any, Any, Any, Any]:
    """Return (cfg, parameters, tokenizer, the checkpoint's meta data)."""
    opened = models.open_model(path, flag)
    then = "without --what its task is scored"
    models.check_masked_lm(opened, f"--what={args.what}: {path}", then)
    opened.config.dtype = args.dtype
    params = opened.read_params("mlm", args.weights)
    params, cfg = fill_blanks.masked_lm(params, opened.cfg)
    return cfg, params, opened.tokenizer, opened.meta


class Score(NamedTuple):
    """A text's pseudo-log-likelihood in nats; None where it is too long or no token."""

    score: float | None
    tokens: int  # special ones around it not counted
    words: int  # as whole-word masking has them
    unknown: int  # tokens that are the unknown token


def score_texts(
    cfg: Any,
    params: Any,
    tokenizer: Any,
    texts: Sequence[str],
    variant: str = "original",
    batch_size: int | None = None,
) -> list[Score]:
    """Score each text, as [CLS] text [SEP]; what is in it does not act on others.

    Texts of the same tokens get the same score, bit for bit. Special tokens written in
    a text are plain text. Raises UserError for a model that gives NaN.
    """
    encoded = [tuple(ids) for ids in tokenizer.encode_batch(list(texts))]
    fitting = [ids for ids in encoded if 0 < len(ids) <= cfg.max_length - 2]
    score = make_scorer(cfg, params, tokenizer, variant, batch_size)
    # Each once: minimal pairs share sentences, and what is the same has to tie.
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
    """Number the word of each token from 1; `starts` [V] says which begin one.

    >>> find_words([7, 8, 7], starts)  # 8 is a ##piece
    array([1, 1, 2])
    """
    begins = starts[np.array(ids, np.int64)]
    begins[:1] = True
    return np.cumsum(begins)


def make_scorer(
    cfg: Any, params: Any, tokenizer: Any, variant: str, batch_size: int | None = None
) -> Callable[[Sequence[Sequence[int]]], list[float]]:
    """Make score(texts of ids, without special ones) -> their scores.

    A row a token, padded to one of few lengths; the last layer and the head are
    computed at the hidden token alone. batch_size: rows at once at most, by default as
    many as is quick.
    """
    from bertjax.inference import forward  # which needs jax

    params, cfg = fill_blanks.masked_lm(params, cfg)
    params = forward.place_params(params, cfg)
    run = functools.partial(forward.make_forward(cfg, forward.log_likelihoods), params)

    def score(texts: Sequence[Sequence[int]]) -> list[float]:
        totals = np.zeros(len(texts))
        sizes = np.array([len(ids) + 2 for ids in texts], np.int32)
        rows = int((sizes - 2).sum())
        with Progress("score", rows, "tokens", count_work(sizes)) as progress:
            parts = batches(texts, tokenizer, variant, batch_size)
            for which, values in forward.run_batches(parts, run, progress):
                np.add.at(totals, which, values)
        return totals.tolist()

    return score


def batches(
    texts: Sequence[Sequence[int]],
    tokenizer: Any,
    variant: str,
    batch_size: int | None = None,
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Yield a row a token of each text: (which text [n], batch), i32.

    batch: input_ids [R, L], sizes [R], the hidden position mlm_positions [R, 1] and the
    hidden token truth [R]; rows from n on repeat another.

    Worked example, of the text 10 11 12 whose 12 goes on the word of 11 (cls 2, sep 3,
    mask 4): within_word has the rows 2 4 11 12 3, 2 10 4 4 3 and 2 10 11 4 3.
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
        # Parts of equal size: a last one that has to be filled up costs as the others.
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
                    "mlm_positions": here,
                    "truth": np.take_along_axis(ids[which], here, 1)[:, 0],
                },
            )


def count_work(sizes: np.ndarray) -> int:
    """Return the padded tokens of all rows of texts of these sizes, i32 [n]."""
    tops = np.array(choose_lengths(sizes, LENGTHS))
    return int(((sizes - 2) * tops[np.searchsorted(tops, sizes)].astype(int)).sum())


def choose_lengths(sizes: np.ndarray, most: int) -> list[int]:
    """Choose at most `most` lengths to pad rows to, so that padding is least.

    sizes: of texts, i32 [n]; a text has a row a token. By dynamic programming over
    which length is the next smaller one.

    >>> choose_lengths(np.array([5, 5, 6, 30]), 2)
    [6, 30]
    """
    known, count = np.unique(sizes, return_counts=True)
    rows = np.cumsum(np.append(0, count * known))
    least = np.append(0.0, np.full(len(known), np.inf))  # to pad the first j sizes
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
