# SPDX-License-Identifier: Apache-2.0
"""Bound ln p(text) by a model that fills masks.

For masked diffusion without time conditioning, take the cost of the masked tokens,
divided by the share of tokens that is masked. Its mean over random masks is at least
-ln p of the text (Sahoo et al. 2024, MDLM, equation 10). It is also the mean cost of
filling in the tokens, over all orders (Ou et al. 2025, RADD, section 3.3).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError, registry
from bertjax.data import counter_rng
from bertjax.scoring.token_rows import Row, Window, make_row_scorer

ANY_ORDER, CONTINUOUS = "any_order", "continuous"
ESTIMATORS = dict.fromkeys((ANY_ORDER, CONTINUOUS))


class Masks(NamedTuple):
    """Masks of a text: masks bool [R, n], weights f64 [R].

    The sum over rows of the weight times the cost of the masked tokens estimates the
    bound. exact: it is the bound.
    """

    masks: np.ndarray
    weights: np.ndarray
    exact: bool


class Bound(NamedTuple):
    """A bound of ln p in nats, and its variance from the random draws."""

    value: float
    variance: float


def pick_draws(draws: int | None, default: int) -> int:
    """Return the number of masks per text. Raises UserError."""
    if draws is not None and draws % 2:
        raise UserError(
            f"--draws={draws} is odd: draws are compared in pairs, to tell how far "
            f"they are off; give {draws + 1}"
        )
    return draws or default


def pick_estimator(name: str | None) -> str:
    """Return how masks are drawn, by default any_order. Raises UserError."""
    registry.pick("--estimator", name or ANY_ORDER, ESTIMATORS)
    return name or ANY_ORDER


def draw_masks(n: int, draws: int, estimator: str, key: np.ndarray) -> Masks:
    """Draw masks of n tokens; key: u64, of the text.

    any_order: draw a number k of tokens, uniform in 1 to n, then any k of them, with
    weight n / k; if there are at most `draws` different masks, return all.
    continuous: draw a rate p, uniform in (0, 1], then each token independently, with
    weight 1 / p. The draws divide the range of k or p evenly: draw j is in the j-th
    part (low discrepancy).

    Example with 4 tokens and 2 draws, each at 0.3 of its half: k = 1 + floor(4 * 0.15)
    = 1 and 1 + floor(4 * 0.65) = 3, with weights 4 / 1 / 2 and 4 / 3 / 2.
    """
    if estimator == ANY_ORDER and n < 31 and 2**n - 1 <= draws:
        masks = np.array([*itertools.product((False, True), repeat=n)][1:])
        k = masks.sum(axis=1)
        alike = np.bincount(k)[k]  # the number of masks with as many tokens
        return Masks(masks, 1 / (k * alike), True)
    each = np.arange(draws)
    place = (each + counter_rng.uniform(key, each)) / draws
    keys = counter_rng.fold(key, "mask", each)[:, None]
    noise = counter_rng.uniform(keys, np.arange(n))
    if estimator == CONTINUOUS:
        rate = 1 - place
        return Masks(noise < rate[:, None], 1 / (rate * draws), False)
    k = 1 + np.minimum((n * place).astype(np.int64), n - 1)
    rank = noise.argsort(axis=1, kind="stable").argsort(axis=1)
    return Masks(rank < k[:, None], n / (k * draws), False)


def text_key(ids: np.ndarray) -> np.ndarray:
    """Return the key u64 of a text's draws, which depends only on its tokens."""
    places = np.arange(len(ids))
    each = counter_rng.fold(0, "elbo", places, ids)
    return counter_rng.fold(np.bitwise_xor.reduce(each), len(ids))


def masked_row(
    ids: np.ndarray, window: Window, mask: np.ndarray, tokenizer: Any, before: bool
) -> Row:
    """Build a row for a window; mask: bool [n], of its scored tokens.

    before: predictions are read one position to the left, as in masked next-token
    prediction. Example: the tokens 17 25 31 46 with the last three scored and two of
    them masked (cls 2, sep 3, mask 4), first without `before`, then with it:

        ids           2 17  4 31  4  3        2 17  4 31  4  3
        positions           2     4              1     3
        truth              25    46             25    46
    """
    own = ids[window.start : window.end]
    row = np.array([tokenizer.cls_id, *own, tokenizer.sep_id], np.int32)
    at = (1 + window.first - window.start + np.flatnonzero(mask)).astype(np.int32)
    truth = row[at]
    row[at] = tokenizer.mask_id
    return Row(row, at - np.int32(before), truth)


def make_bounder(
    cfg: Any,
    params: Any,
    tokenizer: Any,
    *,
    draws: int,
    estimator: str,
    before: bool = False,
    batch_size: int | None = None,
) -> Callable[[Sequence[tuple[np.ndarray, Window]]], list[Bound]]:
    """Build bound(windows of texts of ids) -> the bound of ln p for each.

    Only the scored tokens of a window are masked; those before them are visible. [MASK]
    has probability 0. The draws of a text depend only on its tokens and `draws`.
    """
    score = make_row_scorer(
        cfg, params, tokenizer.pad_id, never=tokenizer.mask_id, batch_size=batch_size
    )

    def bound(windows: Sequence[tuple[np.ndarray, Window]]) -> list[Bound]:
        if not windows:
            return []
        drawn = []
        for ids, window in windows:
            key = text_key(ids[window.start : window.end])
            n = window.end - window.first
            drawn.append(draw_masks(n, draws, estimator, key))
        counts = [len(one.weights) for one in drawn]
        owner = np.repeat(np.arange(len(windows)), counts)
        within = np.concatenate([np.arange(n) for n in counts])
        sizes = np.array([w.end - w.start + 2 for _, w in windows], np.int64)[owner]

        def make(i: int) -> Row:
            ids, window = windows[owner[i]]
            mask = drawn[owner[i]].masks[within[i]]
            return masked_row(ids, window, mask, tokenizer, before)

        masked = np.concatenate([m.masks.sum(axis=1) for m in drawn])
        parts = np.split(score(sizes, masked, make), np.cumsum(counts)[:-1])
        return [add_up(m, part) for m, part in zip(drawn, parts, strict=True)]

    return bound


def add_up(drawn: Masks, costs: np.ndarray) -> Bound:
    """Return the bound of a text; costs: ln p of the masked tokens of each row, [R].

    The variance is that of collapsed strata (Cochran 1977, section 5A.12): each draw is
    the only one in its part of the range, and is compared with that of the next part.
    """
    values = drawn.weights * costs
    total = float(values.sum())
    if drawn.exact:
        return Bound(total, 0.0)
    return Bound(total, float(np.square(values[::2] - values[1::2]).sum()))
