# SPDX-License-Identifier: Apache-2.0
"""Build rows of tokens, and compute the cost of predictions of any kind.

A row has ids and positions at which tokens are predicted (`truth`): the next token in a
causal row, the hidden token in a masked one.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.data.progress import Progress

LOGITS_MB = 256  # of logits at once, if the model has no limit of its own
ROWS, TOKENS = 256, 8192  # the most rows, and padded tokens, at once


class Row(NamedTuple):
    """A row: ids i32 [n]; positions, truth: i32 [p], of the predictions."""

    ids: np.ndarray
    positions: np.ndarray
    truth: np.ndarray


class Window(NamedTuple):
    """Tokens [start, end) of a text; those from `first` on are scored."""

    start: int
    first: int
    end: int


def cut_windows(n: int, room: int, stride: int) -> list[Window]:
    """Cut a text of n tokens into windows of `room` that begin every `stride` tokens.

    Each token is scored once, in the first window that contains it: all tokens of the
    first window, then `stride` tokens that see the room - stride tokens before them.

    >>> [tuple(window) for window in cut_windows(8, 4, 3)]
    [(0, 0, 4), (3, 4, 7), (6, 7, 8)]
    """
    windows = [Window(0, 0, min(room, n))]
    while (last := windows[-1]).end < n:
        start = last.start + stride
        windows.append(Window(start, last.end, min(start + room, n)))
    return windows


def causal_row(ids: np.ndarray, window: Window, begin: int | None) -> Row:
    """Build the row that predicts the scored tokens of a window from left to right.

    begin: the token before them; None: there is none, and the first token is not
    predicted. Example: the tokens 17 25 31 3 with the last two scored, begin 2:

        ids           2 17 25 31
        positions           2  3
        truth              31  3
    """
    own = ids[window.start : window.end].astype(np.int32)
    tokens = own if begin is None else np.append(np.int32(begin), own)
    last = len(tokens) - 1
    first = max(last - (window.end - window.first), 0)
    positions = np.arange(first, last, dtype=np.int32)
    return Row(tokens[:-1], positions, tokens[1 + positions])


def make_row_scorer(
    cfg: Any,
    params: Any,
    pad_id: int,
    *,
    steps: bool = False,
    never: int | None = None,
    batch_size: int | None = None,
) -> Callable[[np.ndarray, np.ndarray, Callable[[int], Row]], np.ndarray]:
    """Build score(sizes, counts, make) -> the sum of ln p over each row's predictions.

    make(i) -> row i, of sizes[i] ids and counts[i] predictions, both i64 [n]; sums are
    f64 [n]. Rows are padded on the right, and the head is computed at the predictions
    only. steps: attention_steps make attention causal, which a decoder does not need.
    never: an id with probability 0. Raises UserError for a model that returns NaN.
    """
    from bertjax.inference import forward  # needs jax

    cfg = dataclasses.replace(cfg, max_logits_mb=cfg.max_logits_mb or LOGITS_MB)
    params = forward.place_params(params, cfg)
    compiled = forward.make_forward(cfg, forward.token_log_likelihoods, never)
    run = functools.partial(compiled, params)

    def score(
        sizes: np.ndarray, counts: np.ndarray, make: Callable[[int], Row]
    ) -> np.ndarray:
        totals = np.zeros(len(sizes))
        if not len(sizes):
            return totals
        rows = batch_size or max(1, min(ROWS, TOKENS // int(sizes.max())))
        # Within a length, put rows with the same number of predictions together.
        order = np.argsort(-counts, kind="stable")
        rows, parts = forward.plan_batches(sizes[order], rows, cfg.max_length)
        planned = [(order[which], length) for which, length in parts]
        batches = make_batches(planned, rows, make, pad_id, steps)
        work = forward.count_work(planned)
        with Progress("score", len(sizes), "rows", work) as progress:
            for which, values in forward.run_batches(batches, run, progress):
                totals[which] = values.astype(np.float64).sum(axis=1)
        if not np.isfinite(totals).all():
            raise UserError("the model's probabilities are not finite (NaN)")
        return totals

    return score


def make_batches(
    planned: Sequence[tuple[np.ndarray, int]],
    rows: int,
    make: Callable[[int], Row],
    pad_id: int,
    steps: bool,
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Yield (row indices, batch), as planned by `forward.plan_batches`."""
    for which, length in planned:
        own = [make(int(i)) for i in which]
        most = max(len(row.truth) for row in own)
        slots = next(n for k in (8, 4, 2, 1) if (n := -(-length // k)) >= most)
        batch = {
            "input_ids": np.full((rows, length), pad_id, np.int32),
            "sizes": np.ones(rows, np.int32),
            "mlm_positions": np.zeros((rows, slots), np.int32),
            "truth": np.zeros((rows, slots), np.int32),
            "weights": np.zeros((rows, slots), np.float32),
        }
        for slot, (ids, positions, truth) in enumerate(own):
            batch["sizes"][slot] = len(ids)
            batch["input_ids"][slot, : len(ids)] = ids
            batch["mlm_positions"][slot, : len(truth)] = positions
            batch["truth"][slot, : len(truth)] = truth
            batch["weights"][slot, : len(truth)] = 1
        if steps:
            columns = np.arange(1, length + 1, dtype=np.int32)
            batch["attention_steps"] = columns * (columns <= batch["sizes"][:, None])
        yield which, batch
