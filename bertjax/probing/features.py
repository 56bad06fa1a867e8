# SPDX-License-Identifier: Apache-2.0
"""Features of texts at every depth of a frozen encoder, each text read once."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax import UserError
from bertjax.data.progress import Progress
from bertjax.fill_mask import bucket_lengths
from bertjax.models import encoder, stacks
from bertjax.models.config import EncoderConfig
from bertjax.models.pooling import POOLINGS
from bertjax.tasks.texts import Texts

Batch = dict[str, np.ndarray]


def make_reader(
    cfg: EncoderConfig, params: Any, pooling: str
) -> Callable[[Batch], jax.Array]:
    """Make read(batch) -> f32 [N + 1, B, D]: layer 0 is the embeddings.

    params: the encoder's own; nothing here takes their gradient. pooling: "mean", over
    the real tokens, [CLS] and [SEP] too, or "cls", the first one. Each layer is pooled
    where it is computed, so that whole layers are never side by side.
    """
    pool = POOLINGS[pooling]
    cfg = encoder.without_pooler(cfg)
    held = jax.device_put(stacks.unstack(params, cfg))

    @jax.jit
    def run(held: Any, batch: Batch) -> jax.Array:
        def keep(x: jax.Array) -> jax.Array:
            return pool(x.astype(jnp.float32), batch)

        return encoder.apply_layers(held, cfg, batch, keep)

    return lambda batch: run(held, batch)


def read_texts(
    read: Callable[[Batch], jax.Array],
    texts: Texts,
    tokenizer: Any,
    layers: int,
    width: int,
    batch_size: int,
    longest: int,
) -> np.ndarray:
    """Return the features of all rows, in order: f32 [layers, n, D].

    Rows go by falling length through at most five shapes. UserError for NaN.
    """
    sizes = texts.plan(longest).lengths()
    lengths = bucket_lengths(min(-(-int(sizes.max()) // 16) * 16, longest))
    order = np.argsort(-sizes, kind="stable")
    batch_size = min(batch_size, len(order))
    out = np.empty((layers, texts.n, width), np.float32)
    with Progress("probe", total=texts.n, unit="rows") as progress:
        for begin in range(0, texts.n, batch_size):
            which = order[begin : begin + batch_size]
            length = next(n for n in lengths if n >= sizes[which[0]])
            filled = np.concatenate([which, np.repeat(which[-1:], batch_size)])
            batch = texts.plan(length).gather(filled[:batch_size], None, tokenizer)
            batch.pop("labels", None)
            found = np.asarray(read(batch))[:, : len(which)]
            if not np.isfinite(found).all():
                raise UserError("--model: what its layers give is not finite (NaN)")
            out[:, which] = found
            progress.add(len(which))
    return out


def check_memory(rows: int, layers: int, width: int, free: int | None = None) -> str:
    """Say what the features of `rows` take. UserError where that is not there.

    They are held twice, as they were read and where the probes learn. free: bytes; by
    default what this machine has, and the accelerator where it says so.
    """
    need = 2 * 4 * rows * layers * width
    told = f"{rows:,} rows x {layers} layers x {width}: {need / 1e9:,.2f} GB of memory"
    free = free_memory() if free is None else free
    if need > free:
        raise UserError(
            f"features of {told}, and {free / 1e9:,.2f} GB are free: give fewer rows"
        )
    return told


def free_memory() -> int:
    """Return the bytes that are free, of this machine and of its first device."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # counts caches as free
            found = dict(line.split(":") for line in file)
        free = int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        pass
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        free = min(free, stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return free
