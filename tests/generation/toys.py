# SPDX-License-Identifier: Apache-2.0
"""Models for tests of generation: a table of probabilities, and one without a cache."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

V, T, END = 5, 4, 0


class Toy(NamedTuple):
    """A decoder of generation/decode.py."""

    prefill: Any
    extend: Any


def draw_table(seed: int = 0, sharp: float = 1.0) -> np.ndarray:
    """Return logits by (position, token before last, last token): f32 [T, V, V, V]."""
    table = np.random.RandomState(seed).randn(T, V, V, V) * sharp
    return table.astype(np.float32)


def _look_up(table: Any, cache: Any) -> jax.Array:
    before, last, place = cache
    return table[jnp.clip(place, 0, T - 1), before, last]


def _prefill(table: Any, batch: Any, room: int) -> Any:
    ids = batch["input_ids"]
    size = batch["attention_mask"].sum(axis=1)
    rows = jnp.arange(len(ids))
    cache = ids[rows, size - 2], ids[rows, size - 1], jnp.zeros(len(ids), jnp.int32)
    return cache, _look_up(table, cache)


def _extend(table: Any, cache: Any, ids: jax.Array) -> Any:
    _, last, place = cache
    cache = last, ids[:, 0], place + 1
    return cache, _look_up(table, cache)[:, None]


TOY = Toy(_prefill, _extend)


def prompts(rows: list[list[int]], width: int = 0) -> dict[str, np.ndarray]:
    """Return a batch of rows, padded on the right."""
    width = max(width, *map(len, rows))
    ids = np.full((len(rows), width), 1, np.int32)
    mask = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def every_text(table: np.ndarray, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Return ln p of all texts after a prompt, with an end or of T tokens."""
    found = {}

    def follow(text: tuple[int, ...], score: float) -> None:
        if text[-1:] == (END,) or len(text) == T:
            found[text] = score
            return
        before, last = (*prompt, *text)[-2:]
        logits = table[len(text), before, last].astype(np.float64)
        likely = logits - np.log(np.exp(logits).sum())
        for token in range(V):
            follow((*text, token), score + likely[token])

    follow((), 0.0)
    return found


def recomputing_decoder(cfg: Any) -> Toy:
    """Make a decoder that caches only ids, and recomputes everything at each step."""
    from bertjax.models import encoder, heads

    def logits(params: Any, ids: jax.Array, size: jax.Array, first: Any) -> jax.Array:
        columns = jnp.arange(ids.shape[1])
        real = (columns < size[:, None]).astype(jnp.int32)
        batch = {"input_ids": ids, "attention_mask": real}
        if first is not None:  # prefix LM: the context has full attention
            batch["attention_steps"] = (columns + 1) * (columns >= first[:, None])
        hidden = encoder.apply(params["encoder"], cfg, batch).hidden
        word = params["encoder"]["embeddings"]["word"]
        return heads.mlm_logits(params.get("mlm", {}), word, cfg, hidden)

    def prefill(params: Any, batch: Any, room: int) -> Any:
        ids, size = batch["input_ids"], batch["attention_mask"].sum(axis=1)
        ids = jnp.pad(ids, ((0, 0), (0, room - ids.shape[1])))
        first = size if "attention_steps" in batch else None
        found = logits(params, ids, size, first)
        return (ids, size, first), found[jnp.arange(len(ids)), size - 1]

    def extend(params: Any, cache: Any, new: jax.Array) -> Any:
        ids, size, first = cache
        ids = ids.at[jnp.arange(len(ids)), size].set(new[:, 0])
        found = logits(params, ids, size + 1, first)
        return (ids, size + 1, first), found[jnp.arange(len(ids)), size][:, None]

    return Toy(prefill, extend)
