# SPDX-License-Identifier: Apache-2.0
"""Inputs made up for measuring: rows, a text, its tokenizer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax.assembly import resolve
from bertjax.tasks.task_type import find_task_type, with_options

VOCAB_SIZE = 30522  # of synthetic rows, unless model.vocab_size says otherwise
SEQUENCES = 4  # of a packed row, if it may hold so many


def zipf_ids(shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
    """Draw ids i32 in [low, high), the k-th as often as 1/k: like words of a text."""
    draws = np.random.default_rng(0).random(shape)
    return (low - 1 + (high - low + 1) ** draws).astype(np.int32)


def one_phase(config: ConfigDict) -> ConfigDict:
    """Return a config of one phase: the one with the longest rows, most of them."""
    if not config.phases:
        return config
    one = config.copy_and_resolve_references()
    phase = max(resolve.wanted_phases(config), key=lambda p: (p.length, p.batch_size))
    one.phases = ""
    one.batch_size, one.data.length = phase.batch_size, phase.length
    one.data.mask_rate = phase.mask_rate
    return one


def with_choices(
    config: ConfigDict, text: Sequence[Mapping[str, Any]] | None = None
) -> ConfigDict:
    """Tell an objective of multiple choice how many choices a made-up row has, if that
    is known.

    text: what preflight found in data.train, whose rows have room for so many; else
    they are the columns that task.choices names.
    """
    task_type = find_task_type(config.objective)
    if not task_type or not task_type.several_sequences:
        return config
    columns = config.task.choices.count(",") + 1  # a single one holds lists
    known = text[0]["sequences_per_row"] if text else columns if columns > 1 else 0
    told = config.copy_and_resolve_references()
    told.objective = with_options(config.objective, choices=known)
    return told


def synthetic_batch(
    arrays: Mapping[str, tuple[tuple[int, ...], Any]], vocab_size: int
) -> dict[str, np.ndarray]:
    """Make a batch of full rows; arrays: compiled.batch_arrays, names and shapes.

    Packed rows hold SEQUENCES of one length. Labels are zeros, but of pairs.
    """
    shape = arrays["input_ids"][0]
    length = shape[-1]
    ids = zipf_ids(shape, 5, vocab_size)
    made = {
        "input_ids": ids,
        "attention_mask": np.ones(shape, np.int32),
        "token_type_ids": np.broadcast_to(np.arange(length) >= length // 2, shape),
        "choice_weights": np.ones(shape[:-1], np.float32),
    }
    if "mlm_ids" in arrays:
        rows, predictions = arrays["mlm_ids"][0]
        at = np.linspace(1, length - 2, predictions).astype(np.int32)
        made["mlm_positions"] = np.tile(at, (rows, 1))
        made["mlm_ids"] = ids[:, at]
        made["mlm_weights"] = np.ones((rows, predictions), np.float32)
    for name in ("nsp_labels", "sop_labels"):
        if name in arrays:
            made[name] = np.indices(arrays[name][0]).sum(axis=0) % 2
    if "segment_ids" in arrays:
        slots = arrays["cls_positions"][0]
        n = min(slots[1], SEQUENCES)
        wide = -(-length // n)
        at = np.arange(length)
        here = np.arange(slots[1]) < n
        made["segment_ids"] = np.broadcast_to(1 + at // wide, shape)
        made["position_ids"] = np.broadcast_to(at % wide, shape)
        made["token_type_ids"] = np.broadcast_to(at % wide >= wide // 2, shape)
        made["cls_positions"] = np.broadcast_to(
            here * wide * np.arange(slots[1]), slots
        )
        made["cls_weights"] = np.broadcast_to(here, slots)
    return {
        name: np.ascontiguousarray(made[name], dtype)
        if name in made
        else np.zeros(dims, dtype)
        for name, (dims, dtype) in arrays.items()
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
