# SPDX-License-Identifier: Apache-2.0
"""Which token attends to which: padding, packed sequences, windows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.models.layers import number_rows, take_at


class AttentionMask(NamedTuple):
    """Which keys a query sees: every backend makes its own form of it.

    keys i32 [B, L]: 1 = real, 0 = padding; in packed rows the number of the sequence, 0
    = padding. window: 0, or a query sees the keys at most window // 2 places away.
    query_positions: None for a query at every position, else i32 [B, P].
    """

    keys: jax.Array
    packed: bool = False
    window: int = 0
    query_positions: jax.Array | None = None

    @property
    def boolean(self) -> jax.Array:
        """Boolean, broadcasts to [B, H, L, L], or to [B, H, P, L].

        Queries that are padding look at the real keys too, so no row has every key
        hidden (their results are never used). In packed rows a query sees the keys of
        its own sequence alone, and padding sees padding. With a window a query sees
        itself, padding or not.
        """
        if self.packed:
            own = self.keys
            if self.query_positions is not None:
                own = take_at(self.keys, self.query_positions)
            mask = own[:, None, :, None] == self.keys[:, None, None, :]
        else:
            mask = (self.keys > 0)[:, None, None, :]
        if not self.window:
            return mask
        at = np.arange(self.keys.shape[1])
        if self.query_positions is None:
            distance = abs(at[:, None] - at)
        else:
            distance = abs(self.query_positions[:, None, :, None] - at)
        return (mask & (distance <= self.window // 2)) | (distance == 0)

    def rows(self, heads: int) -> jax.Array | None:
        """Number the queries as rows of [B, H, L, L]: u32 [B, H, P, 1]; None: all."""
        if self.query_positions is None:
            return None
        b, length = self.keys.shape
        first = number_rows((b, heads, 1, 1)) * np.uint32(length)
        return first + self.query_positions[:, None, :, None].astype(jnp.uint32)


def make_attention_mask(batch: dict[str, jax.Array], window: int = 0) -> AttentionMask:
    """Take attention_mask i32 [B, L], of packed rows segment_ids i32 [B, L]."""
    packed = "segment_ids" in batch
    keys = batch["segment_ids" if packed else "attention_mask"]
    if keys.ndim != 2:
        raise ValueError(f"attention_mask has shape {keys.shape}, not [B, L]")
    return AttentionMask(keys, packed, window)
