# SPDX-License-Identifier: Apache-2.0
"""Which token attends to which: padding, packed sequences, windows, steps.

A batch's `attention_steps`, i32 [B, L], has one signed number per token. A token of
step 0 is context; one of step +j is visible from step j on; one of step -j is visible
only at step j. A query of step q attends to a key of step k in its sequence if k == q
or 0 <= k <= |q| - (q < 0):

    a prefix LM             prefix 0 0 0, response 1 2 3
    pseudo-masked LM        context 0, originals of block j +j, their [P] -j
    block diffusion         noised block b -b, clean block b +b
    two-stream attention    content at order j +j, the query stream's copy -j

(Bao et al. 2020, UniLMv2; Arriola et al. 2025, BD3-LM; Yang et al. 2019, XLNet, section
2.3. The signs are those of microsoft/unilm's s2s-ft.)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.models.config import EncoderConfig
from bertjax.models.layers import count_up, number_rows, take_at


def is_visible(query: Any, key: Any) -> Any:
    """Return whether tokens of step `query` attend to tokens of step `key`: boolean.

    Both are broadcastable arrays of signed int: of numpy, jax or inside a kernel. A
    token attends to its own step, so every query has a key.

    >>> is_visible(np.array([-2, 2, 0])[:, None], np.array([0, 1, 2, -2])).astype(int)
    array([[1, 1, 0, 1],
           [1, 1, 1, 0],
           [1, 0, 0, 0]])
    """
    last = abs(query) - (query < 0)
    return (key == query) | ((key >= 0) & (key <= last))


class MaskKind(NamedTuple):
    """The static features of a mask, which decide what backends support it."""

    causal: bool = False
    steps: bool = False
    window: bool = False
    bias: bool = False
    edges: bool = False


FULL = MaskKind()


def mask_kind(cfg: EncoderConfig, steps: bool, edges: bool = False) -> MaskKind:
    """Return the mask features that an encoder needs: all its layers share a backend.

    steps, edges: whether its batches have attention_steps, attention_edges.
    """
    bias = cfg.relative_attention_num_buckets > 0
    return MaskKind(cfg.is_decoder, steps, not all(cfg.is_global), bias, edges)


class AttentionMask(NamedTuple):
    """The keys that each query attends to, from which each backend builds its own mask.

    keys: i32 [B, L], 1 = real, 0 = padding; in packed rows the number of the sequence,
    0 = padding. packed: rows hold several sequences. window: 0, or a query attends to
    the keys at most window // 2 positions away. query_positions: None for a query at
    every position, otherwise i32 [B, P]. steps: None, or i32 [B, L] as is_visible reads
    them. positions: None, or i32 [B, L], the positions by which a window is measured:
    with steps a copy of a token is far from it in the row. causal: a query attends to
    no key after it in the row. bias: None, or f32 [1, H, L, L] or [B, H, L, L], added
    to the scores of visible keys; [B, H, P, L] if it is for the queries at
    query_positions only. queries: None, or i32 [B, T], numbers like those of `keys` for
    queries of another sequence: those of a decoder that attends to an encoder's tokens.
    edges: None, or i8 [B, L, L], 1 where a query (axis 1) attends to a key, provided
    that the rest of the mask allows it; each query must have a real key.
    """

    keys: jax.Array
    packed: bool = False
    window: int = 0
    query_positions: jax.Array | None = None
    steps: jax.Array | None = None
    positions: jax.Array | None = None
    causal: bool = False
    bias: jax.Array | None = None
    queries: jax.Array | None = None
    edges: jax.Array | None = None

    @property
    def kind(self) -> MaskKind:
        has_steps, has_bias = self.steps is not None, self.bias is not None
        has_edges = self.edges is not None
        return MaskKind(self.causal, has_steps, self.window > 0, has_bias, has_edges)

    @property
    def compares_sequences(self) -> bool:
        """True if a query attends only to keys with its own number in `keys`.

        Padding then attends to padding. This holds for steps and causal masks in
        unpacked rows too, where padding in front of a causal row would otherwise have
        no visible key.
        """
        return self.packed or self.causal or self.steps is not None

    @property
    def boolean(self) -> jax.Array:
        """The boolean mask, which broadcasts to [B, H, L, L] or [B, H, P, L].

        Padding queries attend to the real keys too, so no query has all keys hidden
        (their results are never used). In packed rows, with steps and in causal masks
        a query attends only to keys of its own sequence, and padding to padding. With
        a window a query attends to itself, even if it is padding. Padding in `queries`
        attends to all keys of packed rows, because these keys may include no padding.
        """
        if self.queries is not None:
            return self._of_memory()
        if self.compares_sequences:
            mask = self._of_queries(self.keys) == self.keys[:, None, None, :]
        else:
            mask = (self.keys > 0)[:, None, None, :]
        if self.steps is not None:
            keys = self.steps[:, None, None, :]
            mask = mask & is_visible(self._of_queries(self.steps), keys)
        if self.edges is not None:
            mask = mask & (self._edges_of_queries() > 0)[:, None]
        if self.causal or (self.window and self.positions is None):
            return self._by_place(mask)
        if not self.window:
            return mask
        away = self._of_queries(self.positions) - self.positions[:, None, None, :]
        return mask & (abs(away) <= self.window // 2)

    def _of_memory(self) -> jax.Array:
        """Build the mask for `queries`, which are no keys here: [B, 1, T or 1, L]."""
        keys = self.keys[:, None, None, :]
        if not self.packed:
            return keys > 0
        own = self.queries[:, None, :, None]
        return (own == keys) | (own == 0)

    def _by_place(self, mask: jax.Array) -> jax.Array:
        """Apply causality and the window to a mask, by positions in the row."""
        at = count_up(self.keys.shape[1])
        if self.query_positions is None:
            own = at[:, None]
        else:
            own = self.query_positions[:, None, :, None]
        if self.causal:
            mask = mask & (at <= own)
        if not self.window:
            return mask
        distance = abs(own - at)
        return (mask & (distance <= self.window // 2)) | (distance == 0)

    def _edges_of_queries(self) -> jax.Array:
        """Select the rows of `edges` for the queries: i8 [B, L or P, L]."""
        if self.query_positions is None:
            return self.edges
        at = self.query_positions[:, :, None]
        return jnp.take_along_axis(self.edges, at, axis=1, mode="clip")

    def _of_queries(self, x: jax.Array) -> jax.Array:
        """Select the values of x [B, L] at the queries: [B, 1, L or P, 1]."""
        if self.query_positions is not None:
            x = take_at(x, self.query_positions)
        return x[:, None, :, None]

    @property
    def bias_of_queries(self) -> jax.Array:
        """The bias for the queries only: [1 or B, H, L, L], or [B, H, P, L]."""
        # A bias of P rows has one row per query already. If P equals the cache's L
        # slots, the queries fill the cache, so row i is that of query i as well.
        if self.query_positions is None or self.bias.shape[2] != self.keys.shape[1]:
            return self.bias
        bias = jnp.broadcast_to(self.bias, (len(self.keys), *self.bias.shape[1:]))
        at = self.query_positions[:, None, :, None]
        return jnp.take_along_axis(bias, at, axis=2, mode="clip")

    def rows(self, heads: int) -> jax.Array | None:
        """Number the queries as rows of [B, H, L, L]: u32 [B, H, P, 1].

        None if there is a query at every position.
        """
        if self.query_positions is None:
            return None
        b, length = self.keys.shape
        first = number_rows((b, heads, 1, 1)) * np.uint32(length)
        return first + self.query_positions[:, None, :, None].astype(jnp.uint32)


def make_attention_mask(
    batch: dict[str, jax.Array], window: int = 0, causal: bool = False
) -> AttentionMask:
    """Build a mask from attention_mask i32 [B, L], or segment_ids for packed rows.

    With attention_steps i32 [B, L] a window is measured by the batch's position_ids, if
    it has them. attention_edges i8 [B, L, L] restrict the keys further. Raises
    ValueError for other shapes, and for steps in a causal mask.
    """
    packed = "segment_ids" in batch
    keys = batch["segment_ids" if packed else "attention_mask"]
    if keys.ndim != 2:
        raise ValueError(f"attention_mask has shape {keys.shape}, not [B, L]")
    steps, edges = batch.get("attention_steps"), batch.get("attention_edges")
    if edges is not None and edges.shape != (*keys.shape, keys.shape[1]):
        raise ValueError(f"attention_edges has shape {edges.shape}, not [B, L, L]")
    if steps is None:
        return AttentionMask(keys, packed, window, causal=causal, edges=edges)
    if causal:
        raise ValueError(
            "the batch has attention_steps and model.is_decoder=True: both say who "
            "sees whom; drop the steps, or set model.is_decoder=False"
        )
    if steps.shape != keys.shape:
        raise ValueError(f"attention_steps has shape {steps.shape}, not {keys.shape}")
    positions = batch.get("position_ids") if window else None
    more = dict(steps=steps, positions=positions, edges=edges)
    return AttentionMask(keys, packed, window, **more)
