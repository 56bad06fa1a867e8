# SPDX-License-Identifier: Apache-2.0
"""Inputs made up for measuring: rows, a text, its tokenizer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import build

VOCAB_SIZE = 30522  # of synthetic rows, unless model.vocab_size says otherwise


def zipf_ids(shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
    """Draw ids i32 in [low, high), the k-th as often as 1/k: like words of a text."""
    draws = np.random.default_rng(0).random(shape)
    return (low - 1 + (high - low + 1) ** draws).astype(np.int32)


def synthetic_batch(config: ConfigDict, vocab_size: int) -> dict[str, np.ndarray]:
    """Make a batch [B, L] of full rows with P predictions each, for every objective."""
    b, length, p = (
        config.batch_size,
        config.data.length,
        build.predictions(config, config.data.length),
    )
    ids = zipf_ids((b, length), 5, vocab_size)
    positions = np.linspace(1, length - 2, p).astype(np.int32)
    halves = (np.arange(length) >= length // 2).astype(np.int32)
    return {
        "input_ids": ids,
        "attention_mask": np.ones((b, length), np.int32),
        "token_type_ids": np.tile(halves, (b, 1)),
        "mlm_positions": np.tile(positions, (b, 1)),
        "mlm_ids": ids[:, positions],
        "mlm_weights": np.ones((b, p), np.float32),
        "nsp_labels": np.arange(b, dtype=np.int32) % 2,
        "sop_labels": np.arange(b, dtype=np.int32) % 2,
    }


def synthetic_text(vocab_size: int) -> tuple[Any, Any]:
    """Make a tokenizer's tables and a store: 2M tokens, 24 a sentence, 20 of them a
    document."""
    ids = zipf_ids((2_000_000,), 5, vocab_size)
    sentences = np.arange(0, ids.size + 1, 24)
    tokenizer = SimpleNamespace(
        vocab_size=vocab_size,
        pad_id=0,
        unk_id=1,
        cls_id=2,
        sep_id=3,
        mask_id=4,
        special_ids=np.arange(5),
        replacement_ids=np.arange(5, vocab_size, dtype=np.int32),
        word_starts=np.arange(vocab_size) % 4 > 0,
    )
    store = SimpleNamespace(
        tokens=ids[: sentences[-1]].astype(np.uint32),
        sentences=sentences,
        documents=np.append(np.arange(0, sentences.size - 1, 20), sentences.size - 1),
        counts=np.bincount(ids, minlength=vocab_size),
    )
    return tokenizer, store


def synthetic_store(folder: Path, config: ConfigDict, sequences: int) -> Any:
    """Make a store of nothing but offsets, in files; its tokens take no room.

    Lengths are geometric. Returns an object with the arrays of a Store.
    """
    whole = config.data.plan == "document"
    mean_document = 60 if whole else 1500
    number = sequences if whole else sequences * (config.data.length - 2) // 1300
    draws = np.random.default_rng(0)
    tokens = sentences = 0
    files = {n: open(folder / n, "wb") for n in ("sentences", "documents")}  # noqa: SIM115
    for file in files.values():
        file.write(np.zeros(1, np.int64).tobytes())
    for low in range(0, number, 1 << 18):
        count = min(1 << 18, number - low)
        inside = draws.geometric(25 / mean_document, count)  # sentences of a document
        lengths = draws.geometric(1 / 25, inside.sum())
        files["sentences"].write((tokens + np.cumsum(lengths)).tobytes())
        files["documents"].write((sentences + np.cumsum(inside)).tobytes())
        tokens += int(lengths.sum())
        sentences += int(inside.sum())
    for file in files.values():
        file.close()
    with open(folder / "tokens", "wb") as file:
        file.truncate(2 * tokens)  # a hole: nothing is stored

    def mapped(name: str, dtype: str) -> np.ndarray:
        return np.memmap(folder / name, dtype=dtype, mode="r")

    return SimpleNamespace(
        tokens=mapped("tokens", "<u2"),
        sentences=mapped("sentences", "<i8"),
        documents=mapped("documents", "<i8"),
        counts=np.zeros(1, np.int64),
        marks=None,
        content_hash="synthetic",
    )
