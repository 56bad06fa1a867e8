# SPDX-License-Identifier: Apache-2.0
"""Iterative filling of blanks: each call predicts all blanks, and some are kept.

The order decides which are kept: from left to right, the most confident ones, those of
lowest entropy, or random ones (Ghazvininejad et al. 2019, Mask-Predict; Nie et al.
2025, LLaDA; Sahoo et al. 2024, MDLM). MDLM's ancestral sampler decides about each blank
by a coin flip; here the number of blanks per call is fixed, so that no call is wasted.
Blocks are filled one after the other. Tokens that were kept may be masked again (Wang
et al. 2025, ReMDM).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.generation.pick import (
    GREEDY,
    NEG_INF,
    Pick,
    draw_keys,
    gumbel,
    pick_tokens,
)

Batch = Mapping[str, Any]
# fill(params, batch) -> logits f32 [B, P, V] of the blanks at mlm_positions
Fill = Callable[[Any, Batch], jax.Array]
ORDERS = ("confidence", "entropy", "left", "random")
TOKENS, PLACES, COINS = 0, 1, 2  # the purposes of random noise


class Order(NamedTuple):
    """The order in which blanks are filled.

    name: one of ORDERS. steps: the number of calls among which a row's blanks are
    distributed evenly; 0: one token per call. gamma: for "entropy" only: a call keeps
    as many tokens as possible such that their entropies, in nats and without the
    greatest one, sum to less than gamma, but at least one (Ben-Hamu et al. 2025,
    EB-Sampler). remask: at most this fraction of the kept tokens is masked again before
    a call keeps others (Wang et al. 2025, ReMDM-cap).
    """

    name: str = "confidence"
    steps: int = 0
    gamma: float = 0.0
    remask: float = 0.0


class Unmasked(NamedTuple):
    """The filled rows.

    ids: i32 [B, L]. log_probs: f32 [B, P], ln p of each blank's token when it was kept.
    calls: i32 [B], the number of model calls that each row needed.
    """

    ids: jax.Array
    log_probs: jax.Array
    calls: jax.Array

    @property
    def scores(self) -> jax.Array:
        """The sum of ln p of each row's blanks, f32 [B]."""
        return self.log_probs.sum(axis=-1)


class Loop(NamedTuple):
    """The state of the loop; blank: bool [B, P], the slots that are still masked."""

    step: jax.Array
    ids: jax.Array
    blank: jax.Array
    log_probs: jax.Array
    calls: jax.Array


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("order", "pick"))
def unmask(
    fill: Fill,
    params: Any,
    batch: Batch,
    *,
    order: Order,
    pick: Pick = GREEDY,
    seed: Any = 0,
) -> Unmasked:
    """Fill the blanks of a batch; other tokens do not change.

    batch: input_ids i32 [B, L], in which blanks are masks; mlm_positions i32 [B, P],
    their positions from left to right; free bool [B, P], which of these are blanks and
    not padding; blocks i32 [B, P], the block of each blank, lower ones being filled
    first; rows, samples i32 [B], from which noise is derived; and whatever else `fill`
    reads.
    """
    b, p = batch["mlm_positions"].shape
    total = batch["free"].sum(axis=1)
    steps = total if not order.steps else jnp.full(b, order.steps)
    if not order.remask:
        steps = jnp.minimum(steps, total)
    steps = jnp.maximum(steps, 1)
    mask_ids = jnp.take_along_axis(batch["input_ids"], batch["mlm_positions"], axis=1)

    def go_on(loop: Loop) -> jax.Array:
        return jnp.any(loop.blank)

    def advance(loop: Loop) -> Loop:
        logits = fill(params, {**batch, "input_ids": loop.ids})
        tokens, own, entropy = guess(pick, logits, batch, seed, loop.step)
        kept = batch["free"] & ~loop.blank
        if order.remask:
            # A row without blanks is done, even if others are not.
            going = jnp.any(loop.blank, axis=1, keepdims=True)
            lost = going & draw_lost(order, kept, loop.step, steps, batch, seed)
            kept = kept & ~lost
        block = jnp.where(loop.blank, batch["blocks"], np.iinfo(np.int32).max)
        able = loop.blank & (block == block.min(axis=1, keepdims=True))
        sooner = sort_value(order, own, entropy, batch, seed, loop.step)
        # A nan comes after all numbers, but before blanks that may not be filled yet:
        # otherwise the loop would not end.
        later = jnp.nan_to_num(-sooner, nan=jnp.finfo(jnp.float32).max)
        place = jnp.argsort(jnp.where(able, later, jnp.inf), axis=1, stable=True)
        if order.gamma:
            sizes = jnp.take_along_axis(jnp.where(able, entropy, jnp.inf), place, 1)
            before = jnp.cumsum(sizes, axis=1) - sizes
            most = jnp.maximum(jnp.sum(before < order.gamma, axis=1), 1)
        else:
            # The number that is due by now: ceil(total (step + 1) / steps).
            due = -(-total * (loop.step + 1) // steps)
            most = jnp.minimum(due, total) - kept.sum(axis=1)
            most = jnp.maximum(most, 0 if order.remask else 1)
        rank = jnp.argsort(place, axis=1)
        taken = able & (rank < most[:, None])
        filled = put(loop.ids, batch["mlm_positions"], tokens, taken)
        blank, log_probs = loop.blank & ~taken, jnp.where(taken, own, loop.log_probs)
        if order.remask:
            filled = put(filled, batch["mlm_positions"], mask_ids, lost)
            blank = blank | lost
        calls = loop.calls + jnp.any(loop.blank, axis=1)
        return Loop(loop.step + 1, filled, blank, log_probs, calls)

    start = Loop(
        jnp.int32(0),
        jnp.asarray(batch["input_ids"]),
        jnp.asarray(batch["free"]),
        jnp.zeros((b, p), jnp.float32),
        jnp.zeros(b, jnp.int32),
    )
    done = jax.lax.while_loop(go_on, advance, start)
    return Unmasked(done.ids, done.log_probs, done.calls)


def guess(
    pick: Pick, logits: jax.Array, batch: Batch, seed: Any, step: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Predict each blank from logits [B, P, V].

    Returns tokens i32 [B, P], their ln p, and the entropies in nats, f32 [B, P]. ln p
    and entropies are those of the model, without temperature, top_k and top_p.
    """
    likely = jax.nn.log_softmax(logits, axis=-1)
    entropy = -jnp.sum(
        jnp.where(likely > NEG_INF, jnp.exp(likely) * likely, 0), axis=-1
    )
    keys = keys_of(batch, seed, step, TOKENS) if pick.draws else None
    tokens = pick_tokens(pick, logits, keys)
    own = jnp.take_along_axis(likely, tokens[..., None], axis=-1)[..., 0]
    return tokens, own, entropy


def sort_value(
    order: Order,
    own: jax.Array,
    entropy: jax.Array,
    batch: Batch,
    seed: Any,
    step: jax.Array,
) -> jax.Array:
    """Return a value for each blank, f32 [B, P]; greater values are filled first."""
    if order.name == "confidence":
        return own
    if order.name == "entropy":
        return -entropy
    if order.name == "random":
        return noise_of(batch, seed, step, PLACES)
    return -jnp.broadcast_to(jnp.arange(own.shape[1], dtype=own.dtype), own.shape)


def draw_lost(
    order: Order,
    kept: jax.Array,
    step: jax.Array,
    steps: jax.Array,
    batch: Batch,
    seed: Any,
) -> jax.Array:
    """Sample which of the tokens kept so far, bool [B, P], are masked again.

    Let alpha be the fraction kept now and beta that after the call. The probability is
    min(remask, (1 - beta) / alpha) for each token, because with a greater one the
    fraction could not become beta.
    """
    alpha = jnp.minimum(step / steps, 1.0)
    beta = jnp.minimum((step + 1) / steps, 1.0)
    share = jnp.minimum(order.remask, (1 - beta) / jnp.maximum(alpha, 1e-9))
    # Gumbel noise x is below -ln(-ln s) with probability s.
    likely = jnp.exp(-jnp.exp(-noise_of(batch, seed, step, COINS)))
    return kept & (likely < share[:, None])


def noise_of(batch: Batch, seed: Any, step: jax.Array, purpose: int) -> jax.Array:
    """Return Gumbel noise for each blank, f32 [B, P]."""
    return gumbel(keys_of(batch, seed, step, purpose), 1)[..., 0]


def keys_of(batch: Batch, seed: Any, step: jax.Array, purpose: int) -> jax.Array:
    """Return a key of jax.random for each blank, [B, P]."""
    slots = jnp.arange(batch["mlm_positions"].shape[1])
    address = batch["rows"], batch["samples"], step, purpose
    return draw_keys(seed, *(jnp.asarray(x)[..., None] for x in address), slots)


def put(
    ids: jax.Array, positions: jax.Array, tokens: jax.Array, taken: jax.Array
) -> jax.Array:
    """Write tokens at positions, both i32 [B, P], where `taken`; ids: i32 [B, L]."""
    rows = jnp.arange(len(ids))[:, None]
    at = jnp.where(taken, positions, ids.shape[1])
    return ids.at[rows, at].set(tokens, mode="drop")
