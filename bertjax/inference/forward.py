# SPDX-License-Identifier: Apache-2.0
"""The forward pass over texts of any length, in a few shapes that are compiled once.

Texts are padded to one of a few lengths (`plan_batches`), a model is compiled once per
length (`make_forward`), and one batch computes while the next is prepared
(`run_batches`).
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.models import encoder, heads, stacked_layers
from bertjax.models.nearest import split_rows
from bertjax.models.pooling import members_of, text_vectors
from bertjax.models.row_chunks import map_rows
from bertjax.objectives import token_head
from bertjax.parallel.cpu_products import onednn_options
from bertjax.parallel.host_memory import count_cores

__all__ = [
    "hidden_states",
    "log_likelihoods",
    "make_forward",
    "mlm_logits",
    "pad_batches",
    "place_params",
    "place_tables",
    "pooled_vectors",
    "run_batches",
    "term_weights",
    "token_log_likelihoods",
    "token_vectors",
    "top_guesses",
]

LENGTHS = 5  # the lengths to which texts are padded
# For many texts on a CPU, which compiles a shape in a second or two, there are more
# lengths; they pay off from MANY tokens on.
MORE_LENGTHS = 9
MANY = 2**16
CPU_TOKENS = 2**11  # per core; on a CPU XLA is a third slower with larger arrays
LONG = 8192  # for longer rows, five lengths would be too far apart


# ---------------------------------------------------------------- what a pass returns
def hidden_states(params: Any, cfg: Any, hidden: Any, batch: Any) -> Any:
    """Return the last layer's hidden states, f32 [B, L, D]."""
    return hidden.astype("float32")


def mlm_logits(params: Any, cfg: Any, hidden: Any, batch: Any) -> Any:
    """Return the masked LM's logits at each hidden state, f32 [B, P, V]."""
    return heads.token_logits(params, cfg, hidden)


def log_likelihoods(params: Any, cfg: Any, hidden: Any, batch: Any) -> Any:
    """Return ln p of the ids `truth` i32 [B] at each row's only position, f32 [B]."""
    word, truth = params["encoder"]["embeddings"]["word"], batch["truth"]
    return heads.log_likelihoods(params.get("mlm", {}), word, cfg, hidden[:, 0], truth)


def token_log_likelihoods(
    params: Any, cfg: Any, hidden: Any, batch: Any, never: int | None
) -> Any:
    """Return weights times ln p of the ids `truth` at each hidden state, f32 [B, P].

    The batch has `truth` i32 [B, P] and `weights` f32 [B, P]. never: an id that gets no
    probability, or None. The logits are computed in chunks as in training
    (cfg.max_logits_mb).
    """
    how = params, cfg, hidden, batch["truth"], never
    return batch["weights"] * token_head.log_likelihoods_in_chunks(*how)


def pooled_vectors(
    params: Any, cfg: Any, hidden: Any, batch: Any, pooling: str, normalize: bool
) -> Any:
    """Return one vector per row, f32 [B, D]; pooling: a key of pooling.POOLINGS."""
    return text_vectors(hidden, batch, pooling, normalize)


def term_weights(params: Any, cfg: Any, hidden: Any, batch: Any, active: int) -> Any:
    """Return each row's largest SPLADE weights over the vocabulary.

    These are "weights" f32 [B, active] and their ids, "terms" i32 [B, active].
    """
    word, is_text = params["encoder"]["embeddings"]["word"], members_of(batch)
    head = params.get(token_head.PARAMS, {})
    weights = heads.term_weights(head, word, cfg, hidden, is_text)[:, 0]
    largest, terms = jax.lax.top_k(weights, min(active, cfg.vocab_size))
    return {"weights": largest, "terms": terms}


def token_vectors(params: Any, cfg: Any, hidden: Any, batch: Any) -> Any:
    """Return one vector per token, f32 [B, L, E] (ColBERT)."""
    return heads.token_vectors(params["colbert"], hidden)


def top_guesses(
    params: Any, cfg: Any, hidden: Any, batch: Any, pieces: int, top_k: int
) -> Any:
    """Return the masked LM's best guesses for a row: (probabilities, ids), [P, top_k].

    pieces: ids from this number on pad the vocabulary, and are never guessed.
    """
    likely = jax.nn.softmax(mlm_logits(params, cfg, hidden, batch)[0], axis=-1)
    beyond = np.arange(cfg.vocab_size) >= pieces
    return jax.lax.top_k(jnp.where(beyond, -1.0, likely), top_k)


# ---------------------------------------------------------------- the compiled pass
@functools.lru_cache(maxsize=32)
def make_forward(
    cfg: Any, readout: Callable[..., Any], *options: Any
) -> Callable[[Any, Any], Any]:
    """Return the jitted run(params, batch) -> readout(params, cfg, hidden, ...).

    The readout also gets the batch and *options. Equal arguments return the same
    function, so that another checkpoint of a model, or a later call, compiles nothing.
    batch: input_ids i32 [B, L]; sizes i32 [B], the real tokens of each row. With
    mlm_positions i32 [B, P] the last layer is computed only there, and hidden is [B, P,
    D]. attention_steps i32 [B, L] are optional (attention_mask.py). params: from
    `place_params`.
    """
    cfg = encoder.without_pooler(cfg)

    @functools.partial(jax.jit, compiler_options=compiler_options(cfg, readout))
    def run(params: Any, batch: Mapping[str, Any]) -> Any:
        chunks = count_cpu_chunks(*batch["input_ids"].shape)
        return map_rows(lambda rows, number: one(params, rows), chunks, batch)

    def one(params: Any, batch: Mapping[str, Any]) -> Any:
        ids = batch["input_ids"]
        real = (jnp.arange(ids.shape[1]) < batch["sizes"][:, None]).astype(jnp.int32)
        batch = {**batch, "attention_mask": real}
        at = batch.get("mlm_positions")
        inputs = {"input_ids": ids, "attention_mask": real}
        if "attention_steps" in batch:
            inputs["attention_steps"] = batch["attention_steps"]
        hidden = encoder.apply(params["encoder"], cfg, inputs, at=at).hidden
        return readout(params, cfg, hidden, batch, *options)

    return run


def compiler_options(cfg: Any, readout: Callable[..., Any]) -> dict[str, Any] | None:
    """Return the compiler options of `make_forward`, None for the usual ones.

    They are for models in bfloat16 whose readout has no products in f32, as logits of
    the vocabulary are.
    """
    if readout not in (hidden_states, pooled_vectors, token_vectors):
        return None
    return (onednn_options() or None) if cfg.dtype == "bfloat16" else None


def count_cpu_chunks(rows: int, length: int) -> int:
    """Return the number of chunks for a batch, a divisor of its rows.

    On a CPU a chunk has at most CPU_TOKENS tokens per core, unless a single row has
    more; elsewhere there is one chunk.
    """
    if jax.default_backend() != "cpu":
        return 1
    wanted = math.ceil(rows * length / (CPU_TOKENS * count_cores()))
    return next((n for n in range(wanted, rows) if rows % n == 0), rows)


def place_params(params: Mapping[str, Any], cfg: Any) -> dict[str, Any]:
    """Put parameters on the device, with separate arrays for each encoder layer."""
    layers = stacked_layers.unstack(params["encoder"], encoder.without_pooler(cfg))
    return jax.device_put({**params, "encoder": layers})


def place_tables(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Put tables that are searched on the device, padded for models/nearest.py."""
    placed = {}
    for name, table in tables.items():
        whole = np.zeros((split_rows(len(table), 1)[0], *table.shape[1:]), table.dtype)
        whole[: len(table)] = table
        placed[name] = jax.device_put(whole)
    return placed


# ---------------------------------------------------------------- batches of texts
def bucket_lengths(most: int, count: int = LENGTHS) -> list[int]:
    """Return at most `count` lengths to which texts are padded.

    They rise geometrically to `most`, from a sixteenth of it or from 32, whichever is
    less.

    >>> bucket_lengths(512), bucket_lengths(8192)
    ([32, 64, 128, 256, 512], [32, 128, 512, 2048, 8192])
    >>> bucket_lengths(128, 9)
    [8, 12, 16, 23, 32, 46, 64, 91, 128]
    """
    ratio = max(16.0, most / 32) ** (1 / (count - 1))
    return sorted({math.ceil(most / ratio**k) for k in range(count)})


def plan_batches(
    sizes: np.ndarray, batch_size: int, longest: int
) -> tuple[int, list[tuple[np.ndarray, int]]]:
    """Plan batches of rows, longest first, in at most five shapes.

    On a CPU there are up to nine if the rows are many. sizes: tokens of the rows, i64
    [n]; longest: the greatest length to pad to. Returns the number of rows per batch,
    and (indices of rows, padded length) for each batch. The greatest length is that of
    the longest row. If all rows are one batch, the model's own lengths and a power of
    two of rows are used, so that calls with a few texts reuse the programs of earlier
    calls; above LONG, as for models without a greatest length (T5), lengths follow the
    longest row.

    >>> plan_batches(np.array([7, 20, 9]), 32, 512)
    (4, [(array([1, 2, 0]), 32)])
    """
    if len(sizes) > batch_size:
        longest = min(-(-int(sizes.max()) // 16) * 16, longest)
    else:
        batch_size = min(1 << (len(sizes) - 1).bit_length(), batch_size)
        needed = 1 << (int(sizes.max(initial=1)) - 1).bit_length()
        longest = min(longest, max(needed, LONG))
    many = sizes.sum() >= MANY and jax.default_backend() == "cpu"
    lengths = bucket_lengths(longest, MORE_LENGTHS if many else LENGTHS)
    order = np.argsort(-sizes, kind="stable")
    parts = (order[i : i + batch_size] for i in range(0, len(order), batch_size))
    return batch_size, [
        (which, next(n for n in lengths if n >= sizes[which[0]])) for which in parts
    ]


def count_work(planned: Sequence[tuple[np.ndarray, int]]) -> int:
    """Return the padded tokens of planned batches, a measure of their cost."""
    return sum(len(which) * length for which, length in planned)


def pad_batches(
    rows: Sequence[np.ndarray], pad_id: int, batch_size: int, longest: int
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Yield (indices of rows, batch) of rows of ids, longest first (`plan_batches`).

    The last batch is filled up with rows of one padding token.
    """
    sizes = np.array([len(row) for row in rows])
    batch_size, planned = plan_batches(sizes, batch_size, longest)
    for which, length in planned:
        ids = np.full((batch_size, length), pad_id, np.int32)
        for row, i in zip(ids, which, strict=False):
            row[: sizes[i]] = rows[i]
        real = np.ones(batch_size, np.int32)
        real[: len(which)] = sizes[which]
        yield which, {"input_ids": ids, "sizes": real}


def run_batches(
    batches: Iterable[tuple[np.ndarray, Mapping[str, Any]]],
    run: Callable[[Any], Any],
    progress: Any,
) -> Iterator[tuple[np.ndarray, Any]]:
    """Yield (indices of rows, their outputs as numpy arrays) of each batch, in order.

    run(batch) -> a tree of arrays [B, ...]. One batch computes while the next is
    prepared.
    """

    def finish(which: np.ndarray, length: int, outputs: Any) -> tuple[np.ndarray, Any]:
        outputs = jax.tree.map(lambda x: np.asarray(x)[: len(which)], outputs)
        progress.add(len(which), work=len(which) * length)
        return which, outputs

    running: deque[tuple[np.ndarray, int, Any]] = deque()
    for which, batch in batches:
        running.append((which, batch["input_ids"].shape[-1], run(batch)))
        if len(running) > 1:
            yield finish(*running.popleft())
    while running:
        yield finish(*running.popleft())
