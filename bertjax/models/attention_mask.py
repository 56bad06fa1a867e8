# SPDX-License-Identifier: Apache-2.0
"""Which token attends to which: padding, packed sequences, windows, steps.

`attention_steps` of a batch, i32 [B, L], says who sees whom with one signed number a
token. 0 is context. +j is visible from step j on. -j is visible at step j alone. A
query q sees a key k of its sequence where k == q or 0 <= k <= |q| - (q < 0):

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
    """Say whether tokens of step `query` see tokens of step `key`: boolean.

    Both are arrays of signed int that broadcast, of numpy, jax or a kernel. A token
    sees its own step, so none is left without a key.

    >>> is_visible(np.array([-2, 2, 0])[:, None], np.array([0, 1, 2, -2])).astype(int)
    array([[1, 1, 0, 1],
           [1, 1, 1, 0],
           [1, 0, 0, 0]])
    """
    last = abs(query) - (query < 0)
    return (key == query) | ((key >= 0) & (key <= last))


class MaskKind(NamedTuple):
    """What is static of a mask, by which backends take it or refuse it."""

    causal: bool = False
    steps: bool = False
    window: bool = False
    bias: bool = False
    edges: bool = False


FULL = MaskKind()


def mask_kind(cfg: EncoderConfig, steps: bool, edges: bool = False) -> MaskKind:
    """Return what backends must take for an encoder: all its layers use the same.

    steps, edges: whether its batches have attention_steps, attention_edges.
    """
    bias = cfg.relative_attention_num_buckets > 0
    return MaskKind(cfg.is_decoder, steps, not all(cfg.is_global), bias, edges)


class AttentionMask(NamedTuple):
    """Which keys a query sees: every backend makes its own form of it.

    keys i32 [B, L]: 1 = real, 0 = padding; in packed rows the number of the sequence, 0
    = padding. window: 0, or a query sees the keys at most window // 2 places away.
    query_positions: None for a query at every position, else i32 [B, P]. steps: i32
    [B, L] as is_visible reads them, or None. positions: None, or i32 [B, L], by which a
    window is then measured: with steps copies of a token lie far from it in memory.
    causal: a query sees no key after it in the row. bias: None, or f32 [1, H, L, L] or
    [B, H, L, L], what is added to the scores of the keys that it sees; of the queries
    at query_positions alone it may be [B, H, P, L]. queries: None, or i32 [B, T], the
    same numbers of queries that are no keys here: those of a decoder that reads an
    encoder's tokens. edges: None, or i8 [B, L, L], 1 where a query (axis 1) sees a key,
    of those that it may see otherwise; each query sees some real key.
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
        """True where a query sees keys of its own number alone: padding sees padding.

        So it is with steps and causal masks in unpacked rows too: padding in front of a
        causal row would see no key at all.
        """
        return self.packed or self.causal or self.steps is not None

    @property
    def boolean(self) -> jax.Array:
        """Boolean, broadcasts to [B, H, L, L], or to [B, H, P, L].

        Queries that are padding look at the real keys too, so no row has every key
        hidden (their results are never used). In packed rows, with steps and in causal
        masks a query sees the keys of its own sequence alone, and padding sees padding.
        With a window a query sees itself, padding or not. `queries` that are padding
        see all keys of packed rows, whose memory need not have padding.
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
        """Make the mask of queries that are no keys: [B, 1, T or 1, L]."""
        keys = self.keys[:, None, None, :]
        if not self.packed:
            return keys > 0
        own = self.queries[:, None, :, None]
        return (own == keys) | (own == 0)

    def _by_place(self, mask: jax.Array) -> jax.Array:
        """Leave of a mask what causality and the window do, by places in the row."""
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
        """Take the edges that leave the queries: i8 [B, L or P, L]."""
        if self.query_positions is None:
            return self.edges
        at = self.query_positions[:, :, None]
        return jnp.take_along_axis(self.edges, at, axis=1, mode="clip")

    def _of_queries(self, x: jax.Array) -> jax.Array:
        """Take of x [B, L] what belongs to the queries: [B, 1, P, 1]."""
        if self.query_positions is not None:
            x = take_at(x, self.query_positions)
        return x[:, None, :, None]

    @property
    def bias_of_queries(self) -> jax.Array:
        """The bias of the queries alone: [1 or B, H, L, L], or [B, H, P, L]."""
        # L queries of a cache of L slots fill it: each row is its own query's.
        if self.query_positions is None or self.bias.shape[2] != self.keys.shape[1]:
            return self.bias
        bias = jnp.broadcast_to(self.bias, (len(self.keys), *self.bias.shape[1:]))
        at = self.query_positions[:, None, :, None]
        return jnp.take_along_axis(bias, at, axis=2, mode="clip")

    def rows(self, heads: int) -> jax.Array | None:
        """Number the queries as rows of [B, H, L, L]: u32 [B, H, P, 1]; None: all."""
        if self.query_positions is None:
            return None
        b, length = self.keys.shape
        first = number_rows((b, heads, 1, 1)) * np.uint32(length)
        return first + self.query_positions[:, None, :, None].astype(jnp.uint32)


def make_attention_mask(
    batch: dict[str, jax.Array], window: int = 0, causal: bool = False
) -> AttentionMask:
    """Take attention_mask i32 [B, L], of packed rows segment_ids i32 [B, L].

    With attention_steps i32 [B, L] a window is measured by position_ids, where the
    batch has them. attention_edges i8 [B, L, L] say which keys queries see of those.
    Raises ValueError for other shapes, and for steps in a causal mask.
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
