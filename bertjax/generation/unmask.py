# SPDX-License-Identifier: Apache-2.0
"""Texts by filling blanks: each call of the model guesses all, and some are kept.

Which are kept is the order: from left to right, the most confident, those of least
entropy, or any at random (Ghazvininejad et al. 2019, Mask-Predict; Nie et al. 2025,
LLaDA; Sahoo et al. 2024, MDLM, whose ancestral sampler keeps each by a coin: here it is
the number that is fixed, so that no call is idle). Blocks are filled one after the
other. Tokens that are kept may be taken back (Wang et al. 2025, ReMDM).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.generation.pick import (
    GREEDY,
    NEVER,
    Pick,
    draw_keys,
    gumbel,
    pick_tokens,
)

Batch = Mapping[str, Any]
# fill(params, batch) -> logits f32 [B, P, V] of the blanks at mlm_positions
Fill = Callable[[Any, Batch], jax.Array]
ORDERS = ("confidence", "entropy", "left", "random")
TOKENS, PLACES, COINS = 0, 1, 2  # what noise is for


class Order(NamedTuple):
    """In which order blanks are filled.

    name: one of ORDERS. steps: calls for a row's blanks, as evenly as they go; 0: one
    token a call. gamma: of "entropy": a call keeps as many as there are whose
    entropies, in nats, without the greatest, sum up to less than it; at least one
    (Ben-Hamu et al. 2025, EB-Sampler). remask: at most this share of the tokens that
    are kept is taken back before a call keeps others (Wang et al. 2025, ReMDM-cap).
    """

    name: str = "confidence"
    steps: int = 0
    gamma: float = 0.0
    remask: float = 0.0


class Unmasked(NamedTuple):
    """Filled rows i32 [B, L]; ln p of each blank's token when it was kept, f32 [B, P];
    how many calls of the model each row needed, i32 [B]."""

    ids: jax.Array
    log_probs: jax.Array
    calls: jax.Array

    @property
    def scores(self) -> jax.Array:
        """The sum of ln p of each row's blanks, f32 [B]."""
        return self.log_probs.sum(axis=-1)


class Loop(NamedTuple):
    """What a call hands on; blank: bool [B, P], those that are still to be filled."""

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
    """Fill the blanks of a batch; other tokens stay as they are.

    batch: input_ids i32 [B, L], in which blanks are masks; mlm_positions i32 [B, P],
    where they are, from left to right; free bool [B, P], which of these are blanks, and
    not padding; blocks i32 [B, P], the block of each, lower ones first; rows, samples
    i32 [B], of which noise is made; what else `fill` reads.
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
            # A row without blanks is done, whatever the others are.
            going = jnp.any(loop.blank, axis=1, keepdims=True)
            lost = going & draw_lost(order, kept, loop.step, steps, batch, seed)
            kept = kept & ~lost
        block = jnp.where(loop.blank, batch["blocks"], np.iinfo(np.int32).max)
        able = loop.blank & (block == block.min(axis=1, keepdims=True))
        sooner = sort_value(order, own, entropy, batch, seed, loop.step)
        # What is no number comes late, and yet before what is not able: it has to end.
        later = jnp.nan_to_num(-sooner, nan=jnp.finfo(jnp.float32).max)
        place = jnp.argsort(jnp.where(able, later, jnp.inf), axis=1, stable=True)
        if order.gamma:
            sizes = jnp.take_along_axis(jnp.where(able, entropy, jnp.inf), place, 1)
            before = jnp.cumsum(sizes, axis=1) - sizes
            most = jnp.maximum(jnp.sum(before < order.gamma, axis=1), 1)
        else:
            # As many as are due by now: ceil(total (step + 1) / steps).
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
    """Guess each blank of logits [B, P, V]: tokens i32, ln p of them, and the entropies
    of the guesses in nats, f32 [B, P].

    ln p and entropies are those of the model, whatever the tokens were picked by.
    """
    likely = jax.nn.log_softmax(logits, axis=-1)
    entropy = -jnp.sum(jnp.where(likely > NEVER, jnp.exp(likely) * likely, 0), axis=-1)
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
    """Return a number of each blank, f32 [B, P]: blanks of greater ones come first."""
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
    """Draw which of the tokens kept so far, bool [B, P], are taken back.

    With a share of alpha kept now and beta after the call, each is with a probability
    of min(remask, (1 - beta) / alpha): more would keep the share from becoming beta.
    """
    alpha = jnp.minimum(step / steps, 1.0)
    beta = jnp.minimum((step + 1) / steps, 1.0)
    share = jnp.minimum(order.remask, (1 - beta) / jnp.maximum(alpha, 1e-9))
    # Gumbel noise of x is below -ln(-ln s) with the probability s.
    likely = jnp.exp(-jnp.exp(-noise_of(batch, seed, step, COINS)))
    return kept & (likely < share[:, None])


def noise_of(batch: Batch, seed: Any, step: jax.Array, purpose: int) -> jax.Array:
    """Return Gumbel noise of each blank, f32 [B, P]."""
    return gumbel(keys_of(batch, seed, step, purpose), 1)[..., 0]


def keys_of(batch: Batch, seed: Any, step: jax.Array, purpose: int) -> jax.Array:
    """Return a key of jax.random for each blank, [B, P]."""
    slots = jnp.arange(batch["mlm_positions"].shape[1])
    address = batch["rows"], batch["samples"], step, purpose
    return draw_keys(seed, *(jnp.asarray(x)[..., None] for x in address), slots)


def put(
    ids: jax.Array, positions: jax.Array, tokens: jax.Array, taken: jax.Array
) -> jax.Array:
    """Write tokens at positions, both i32 [B, P], where taken; ids i32 [B, L]."""
    rows = jnp.arange(len(ids))[:, None]
    at = jnp.where(taken, positions, ids.shape[1])
    return ids.at[rows, at].set(tokens, mode="drop")
