# SPDX-License-Identifier: Apache-2.0
"""Features of texts, words and spans at every depth of a frozen encoder.

Each text goes through the encoder once.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax import UserError
from bertjax.data.progress import Progress
from bertjax.inference.forward import count_work, plan_batches
from bertjax.models import encoder, stacked_layers
from bertjax.models.config import EncoderConfig
from bertjax.models.pooling import POOLINGS
from bertjax.probing.labelled_examples import Spans
from bertjax.tasks.task_rows import Batch, Rows
from bertjax.tasks.text_rows import Texts

Reader = Callable[[Batch], np.ndarray]
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def span_means(x: jax.Array, batch: Batch) -> jax.Array:
    """Average x [B, L, D] over the positions [begins, ends), both i32 [B, S].

    Returns [B, S, D], 0 for empty spans.
    """
    at = jnp.arange(x.shape[1])
    inside = (batch["begins"][..., None] <= at) & (at < batch["ends"][..., None])
    weights = inside.astype(x.dtype)  # [B, S, L]
    # By default a TPU rounds the inputs of a product to 8 bits.
    total = jnp.matmul(weights, x, precision=jax.lax.Precision.HIGHEST)
    return total / jnp.maximum(weights.sum(-1, keepdims=True), 1)


POOLS = {**POOLINGS, "spans": span_means}


def make_reader(cfg: EncoderConfig, params: Any, pooling: str) -> Reader:
    """Return read(batch) -> f32 [N + 1, B, D]; layer 0 is the embeddings.

    params: the encoder's own, used without gradients. pooling: "mean" over the real
    tokens, including [CLS] and [SEP]; "cls", the first token; or "spans", which returns
    [N + 1, B, S, D] for the spans in the batch. Each layer is pooled when it is
    computed, so that memory never holds several whole layers. `read` raises UserError
    for outputs that are not finite.
    """
    pool = POOLS[pooling]
    cfg = encoder.without_pooler(cfg)
    params = jax.device_put(stacked_layers.unstack(params, cfg))

    @jax.jit
    def run(params: Any, batch: Batch) -> jax.Array:
        return encoder.apply_layers(
            params, cfg, batch, lambda x: pool(x.astype(jnp.float32), batch)
        )

    def read(batch: Batch) -> np.ndarray:
        features = np.asarray(run(params, batch))
        if not np.isfinite(features).all():
            raise UserError("--model: the outputs of its layers are not finite (NaN)")
        return features

    return read


def read_texts(
    read: Reader, texts: Texts, tokenizer: Any, cfg: EncoderConfig, batch_size: int
) -> np.ndarray:
    """Return the features of all rows, in order: f32 [N + 1, n, D]."""
    plan, rows = texts.plan(cfg.max_length), np.arange(texts.n)
    out = np.empty((cfg.num_hidden_layers + 1, texts.n, cfg.hidden_size), np.float32)
    for which, batch in make_batches(plan, rows, tokenizer, batch_size):
        out[:, which] = read(batch)[:, : len(which)]
    return out


def read_spans(
    read: Reader, spans: Spans, tokenizer: Any, cfg: EncoderConfig, batch_size: int
) -> np.ndarray:
    """Return the features of all examples, in order: f32 [N + 1, n, k * D].

    The k spans of an example are concatenated. Rows without a span are not read.
    """
    plan = spans.words.plan(cfg.max_length)
    row, begin, end = (x.ravel() for x in spans.locate(plan))
    order = np.argsort(row, kind="stable")  # the spans, row by row
    first = np.searchsorted(row[order], np.arange(plan.n + 1))
    counts, sizes = np.diff(first), plan.lengths()
    slot = np.empty(len(row), np.int64)
    slot[order] = np.arange(len(row)) - first[row[order]]
    out = np.empty((cfg.num_hidden_layers + 1, len(row), cfg.hidden_size), np.float32)
    rows = np.flatnonzero(counts)
    for which, batch in make_batches(plan, rows, tokenizer, batch_size):
        shape = batch["input_ids"].shape
        # All batches of a length have one shape.
        slots = counts[sizes <= shape[1]].max()
        inside = np.concatenate([order[first[r] : first[r + 1]] for r in which])
        at = np.repeat(np.arange(len(which)), counts[which]), slot[inside]
        for name, places in (("begins", begin), ("ends", end)):
            batch[name] = np.zeros((shape[0], slots), np.int32)
            batch[name][at] = places[inside]
        out[:, inside] = read(batch)[:, *at]
    return out.reshape(len(out), len(spans.labels), -1)


def make_batches(
    plan: Rows, rows: np.ndarray, tokenizer: Any, batch_size: int
) -> Iterator[tuple[np.ndarray, Batch]]:
    """Yield (numbers of rows, their batch), longest rows first, in a few shapes.

    The last batch is filled up with copies of its last row. plan: the plan for the
    longest rows.
    """
    sizes = plan.lengths()[rows]
    batch_size, planned = plan_batches(sizes, batch_size, plan.length)
    with Progress("probe", len(rows), "rows", count_work(planned)) as progress:
        for indices, length in planned:
            which = rows[indices]
            filled = np.pad(which, (0, batch_size - len(which)), "edge")
            # Keep the plan's rows: another plan could split sentences elsewhere.
            short = replace(plan, length=length)
            batch = short.gather(filled, None, tokenizer)
            yield which, {name: batch[name] for name in INPUTS if name in batch}
            progress.add(len(which), work=len(which) * length)


def check_memory(rows: int, layers: int, width: int) -> str:
    """Return a line about the memory that the features of `rows` examples take.

    They are stored twice, on the host and where the probes are trained. Raises
    UserError if that is more than is free.
    """
    need = 2 * 4 * rows * layers * width
    text = f"{rows:,} examples x {layers} layers x {width}"
    text += f": {need / 1e9:,.2f} GB of memory"
    if need > (free := free_memory()):
        raise UserError(
            f"features of {text}, and {free / 1e9:,.2f} GB are free: give fewer "
            "examples in --train and --valid"
        )
    return text


def free_memory() -> int:
    """Return the free bytes of this machine or its first device, whichever is less."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # counts caches as free
            lines = dict(line.split(":") for line in file)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        pass
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        free = min(free, stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return free
