# SPDX-License-Identifier: Apache-2.0
"""Left-to-right generation: greedy decoding and sampling.

One compiled program does everything: it reads the prompts at once (`prefill`), then
loops over steps (`extend`) until every row has an end token.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.generation.pick import (
    GREEDY,
    Pick,
    draw_keys,
    is_end,
    mark_seen,
    pick_tokens,
)
from bertjax.models.incremental import Decoder

Batch = Mapping[str, Any]


class Generated(NamedTuple):
    """The new tokens of each row, including the end token.

    ids: i32 [B, T], `pad_id` after `lengths`, i32 [B]. log_probs: f32 [B, T], the
    model's ln p of each token, before temperature, top_k and penalties.
    """

    ids: jax.Array
    lengths: jax.Array
    log_probs: jax.Array

    @property
    def scores(self) -> jax.Array:
        """The sum of ln p of each row's tokens, f32 [B]."""
        return self.log_probs.sum(axis=-1)


class Ends(NamedTuple):
    """The end of texts.

    ends: tokens that end a text. pad_id: the token after the end. forced: the last
    token of a text that reaches max_new_tokens; None: no such token.
    """

    ends: tuple[int, ...] = ()
    pad_id: int = 0
    forced: int | None = None


ENDLESS = Ends()


class Loop(NamedTuple):
    """The state of the loop; seen: bool [B, V], or None without a penalty."""

    step: jax.Array
    cache: Any
    token: jax.Array
    ended: jax.Array
    written: Generated
    seen: jax.Array | None


def generate(
    decoder: Decoder,
    params: Any,
    batch: Batch,
    *,
    max_new_tokens: int,
    pick: Pick = GREEDY,
    ends: Ends = ENDLESS,
    seed: int = 0,
    rows: Any = None,
    samples: int = 1,
) -> Generated:
    """Continue each row of a batch, which is one for decoder.prefill.

    rows: i32 [B], the numbers of the rows, from which noise is derived; None: 0 to
    B - 1. samples: texts per row, which are consecutive rows of the result.
    """
    if rows is None:
        rows = np.arange(len(batch["input_ids"]), dtype=np.int32)
    static = decoder, max_new_tokens, pick, ends, samples
    return _generate(*static, params, batch, rows, np.uint32(seed))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _generate(
    decoder: Decoder,
    max_new_tokens: int,
    pick: Pick,
    ends: Ends,
    samples: int,
    params: Any,
    batch: Batch,
    rows: jax.Array,
    seed: jax.Array,
) -> Generated:
    cache, logits = decoder.prefill(params, batch, start_width(batch) + max_new_tokens)
    seen = find_seen(batch, logits.shape[1]) if pick.penalizes else None
    if samples > 1:
        each = jnp.repeat(jnp.arange(len(rows)), samples)
        cache, logits, rows = take_rows((cache, logits, rows), each)
        seen = None if seen is None else seen[each]
    sample = jnp.arange(len(rows)) % samples

    def choose(
        step: jax.Array,
        logits: jax.Array,
        ended: jax.Array,
        written: Generated,
        seen: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, Generated, jax.Array | None]:
        keys = draw_keys(seed, rows, sample, step) if pick.draws else None
        token = pick_tokens(pick, logits, keys, seen)
        likely = jax.nn.log_softmax(logits, axis=-1)
        own = jnp.take_along_axis(likely, token[:, None], axis=1)[:, 0]
        if ends.forced is not None:
            at_end = step == max_new_tokens - 1
            token = jnp.where(at_end, ends.forced, token)
            own = jnp.where(at_end, 0.0, own)  # it is certain: ln 1
        token = jnp.where(ended, ends.pad_id, token)
        written = Generated(
            written.ids.at[:, step].set(token),
            written.lengths + ~ended,
            written.log_probs.at[:, step].set(jnp.where(ended, 0.0, own)),
        )
        if seen is not None:
            seen = mark_seen(seen, token[:, None])
        return token, ended | is_end(token, ends.ends), written, seen

    def go_on(loop: Loop) -> jax.Array:
        return (loop.step < max_new_tokens) & ~jnp.all(loop.ended)

    def advance(loop: Loop) -> Loop:
        cache, logits = decoder.extend(params, loop.cache, loop.token[:, None])
        chosen = choose(loop.step, logits[:, 0], loop.ended, loop.written, loop.seen)
        return Loop(loop.step + 1, cache, *chosen)

    written = nothing_written((len(rows),), max_new_tokens, ends.pad_id)
    first = choose(jnp.int32(0), logits, jnp.zeros(len(rows), bool), written, seen)
    return jax.lax.while_loop(go_on, advance, Loop(jnp.int32(1), cache, *first)).written


def nothing_written(shape: tuple[int, ...], most: int, pad_id: int) -> Generated:
    """Return `shape` rows without tokens, with room for `most`."""
    return Generated(
        jnp.full((*shape, most), pad_id, jnp.int32),
        jnp.zeros(shape, jnp.int32),
        jnp.zeros((*shape, most), jnp.float32),
    )


def take_rows(tree: Any, rows: jax.Array) -> Any:
    """Gather rows, i32 [n], of every array of a tree; a row may occur several times."""
    return jax.tree.map(lambda x: x[rows], tree)


def start_width(batch: Batch) -> int:
    """Return the width of the ids that are continued: a decoder's own, if any."""
    name = "decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"
    return batch[name].shape[1]


def find_seen(batch: Batch, pieces: int) -> jax.Array:
    """Return which tokens occur before the new ones: bool [B, V].

    For an encoder-decoder these are the decoder's tokens, as in transformers.
    """
    side = "decoder_" if "decoder_input_ids" in batch else ""
    ids, real = batch[f"{side}input_ids"], batch[f"{side}attention_mask"]
    seen = jnp.zeros((ids.shape[0], pieces), bool)
    return mark_seen(seen, jnp.where(real > 0, ids, -1))
