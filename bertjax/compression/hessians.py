# SPDX-License-Identifier: Apache-2.0
"""The Hessians of the inputs of each layer's matrices, over calibration texts.

The rows go through the encoder layer by layer; the inputs of a layer are the outputs of
the layers before it, which are already compressed.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.models.config import EncoderConfig
from bertjax.models.embeddings import embed
from bertjax.models.layers import Params
from bertjax.models.skips import Earlier, result_for
from bertjax.models.transformer_layer import (
    apply_layer,
    first_values,
    make_attention_inputs,
)

Batch = Mapping[str, np.ndarray]
Sums = dict[str, jax.Array]


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(8,))
def _run_layer(
    cfg: EncoderConfig,
    is_global: bool,
    tapped: bool,
    layer: Params,
    embeddings: Params,
    batch: dict[str, jax.Array],
    x: jax.Array,
    earlier: Earlier,
    sums: Sums | None,
) -> tuple[jax.Array, Sums | None]:
    """Run one layer on x [B, L, D]; tapped: also return sums over its matrices' inputs.

    For each tap this is X^T diag(real) X, f32 [in, in], plus `sums`; padding and copied
    rows do not count.
    """
    inputs = make_attention_inputs(embeddings, cfg, batch)
    own = inputs[:1] if is_global else inputs[-1:]
    real = (batch["attention_mask"] * batch["example_weights"][:, None]) > 0
    seen: dict[str, jax.Array] = {}

    def tap(name: str, y: jax.Array) -> None:
        y = jnp.where(real.reshape(-1, 1), y.astype(jnp.float32), 0)
        seen[name] = jnp.matmul(y.T, y, precision=jax.lax.Precision.HIGHEST)

    y, _ = apply_layer(
        layer, cfg, x, own, None, {}, earlier=earlier, tap=tap if tapped else None
    )
    if sums is not None:
        seen = {name: seen[name] + sums[name] for name in seen}
    return y, seen if tapped else None


@functools.partial(jax.jit, static_argnums=0)
def _embed(cfg: EncoderConfig, params: Params, batch: dict[str, jax.Array]) -> Any:
    return embed(params, cfg, batch)


class Walk:
    """Runs calibration rows through an encoder, layer by layer, in float32.

    batches: input_ids, attention_mask, optional token_type_ids, i32 [B, L], and
    example_weights f32 [B], 0 for rows that only fill a batch. embeddings: the
    encoder's.
    """

    def __init__(
        self, embeddings: Params, cfg: EncoderConfig, batches: Sequence[Batch]
    ) -> None:
        self.cfg = cfg
        self.batches = [dict(batch) for batch in batches]
        # Later only relative positions are read.
        self.embeddings = {k: v for k, v in embeddings.items() if k == "relative"}
        words = jax.device_put(embeddings)
        self.hidden = [_embed(cfg, words, batch) for batch in self.batches]
        self.first = list(self.hidden) if cfg.embedding_skip else []
        self.values: list[jax.Array] = []
        self.results: list[list[jax.Array]] = [[] for _ in self.batches]
        self.tokens = int(
            sum((b["attention_mask"].T * b["example_weights"]).sum() for b in batches)
        )

    def hessians(self, layer: Params, depths: Sequence[int]) -> dict[str, np.ndarray]:
        """Return E[x x^T] over the real tokens by tap, f32 [in, in].

        layer: the parameters that these depths share. The mean is over all of them.
        """
        layer, sums = jax.device_put(layer), None
        for i in range(len(self.batches)):
            x, results = self.hidden[i], list(self.results[i])
            for depth in depths:
                x, sums = self._step(i, depth, layer, x, results, True, sums)
                results.append(x)
        count = self.tokens * len(depths)
        return {name: np.asarray(x) / np.float32(count) for name, x in sums.items()}

    def advance(self, layer: Params, depths: Sequence[int]) -> None:
        """Run the rows through the layers at these depths, which share parameters."""
        layer = jax.device_put(layer)
        if self.cfg.value_skip and not self.values:
            make = jax.jit(first_values, static_argnums=1)
            self.values = [make(layer, self.cfg, x) for x in self.hidden]
        for i in range(len(self.batches)):
            for depth in depths:
                x, results = self.hidden[i], self.results[i]
                x, _ = self._step(i, depth, layer, x, results, False, None)
                self.hidden[i] = x
                if self.cfg.unet_skips:
                    results.append(x)

    def _step(
        self,
        i: int,
        depth: int,
        layer: Params,
        x: jax.Array,
        results: Sequence[jax.Array],
        tapped: bool,
        sums: Sums | None,
    ) -> tuple[jax.Array, Sums | None]:
        """Run one layer on batch i."""
        earlier = Earlier(
            self.first[i] if self.first else None,
            self.values[i] if self.values else None,
            result_for(self.cfg, depth, results),
        )
        is_global = self.cfg.is_global[depth]
        batch = self.batches[i]
        how = self.cfg, is_global, tapped, layer, self.embeddings
        return _run_layer(*how, batch, x, earlier, sums)
