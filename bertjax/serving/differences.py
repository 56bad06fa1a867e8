# SPDX-License-Identifier: Apache-2.0
"""Compare an export with its model, on texts that every Python has."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.serving.served_model import BLANKS, ServedModel

TEXTS = 16
COMPARED = 512  # tokens of the longest text; attention scores grow with their square
EVERY = 7  # tokens from one blank to the next
LEAST_LOGIT = -1e6  # logits below this mean zero probability
Predict = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]


def real_rows(tokenizer: Any, longest: int, count: int = TEXTS) -> list[np.ndarray]:
    """Return [CLS] text [SEP] as ids i32, from an empty text to a truncated one.

    Texts are Python's help on its syntax; every seventh token is a blank, if the
    vocabulary has a mask token.
    """
    from pydoc_data.topics import topics

    words = " ".join(text for _, text in sorted(topics.items())).split()
    lengths = np.unique(np.geomspace(2, longest, count).astype(int))
    lengths = np.resize(lengths, count)
    rows = []
    for i, length in enumerate(lengths.tolist()):
        begin = 997 * i % (len(words) - 2 * longest)
        ids = tokenizer.encode_batch([" ".join(words[begin : begin + 2 * length])])[0]
        row = np.array([tokenizer.cls_id, *ids[: length - 2], tokenizer.sep_id])
        if tokenizer.has_mask:
            row[3:-1:EVERY] = tokenizer.mask_id
        rows.append(row.astype(np.int32))
    return rows


def make_batch(
    served: ServedModel, rows: list[np.ndarray], pad_id: int, shape: tuple[int, int]
) -> dict[str, np.ndarray]:
    """Pad rows of ids to a batch of `served.inputs`, i32 [B, L].

    With token types, the second half of each row has the second type. Rows that fill up
    the batch have one token.
    """
    ids = np.full(shape, pad_id, np.int32)
    real, types = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    real[:, 0] = 1
    for i, row in enumerate(rows):
        ids[i, : len(row)], real[i, : len(row)] = row, 1
        types[i, len(row) // 2 : len(row)] = 1
    batch = {"input_ids": ids, "attention_mask": real, "token_type_ids": types}
    return {name: batch[name] for name in served.inputs}


def make_batches(
    served: ServedModel, rows: list[np.ndarray], pad_id: int, size: int, longest: int
) -> list[dict[str, np.ndarray]]:
    """Return rows in batches of at most `size`, by falling length (`plan_batches`)."""
    from bertjax.inference.forward import plan_batches

    _, planned = plan_batches(np.array([len(row) for row in rows]), size, longest)
    return [
        make_batch(served, [rows[i] for i in which], pad_id, (len(which), length))
        for which, length in planned
    ]


def blank_positions(batch: Mapping[str, np.ndarray], count: int) -> np.ndarray:
    """Return `count` positions spread over each row's tokens, i32 [B, count]."""
    sizes = batch["attention_mask"].sum(axis=1, keepdims=True)
    return (np.arange(count) * sizes // count).astype(np.int32)


def largest_difference(
    served: ServedModel, predict: Predict, batches: list[dict[str, np.ndarray]]
) -> float:
    """Return the largest difference of any output at real tokens, or of whole texts.

    predict: runs the export. It is compared with the model itself, whose layers are a
    loop over stacked parameters here. Raises UserError for outputs that are not finite.
    """
    import jax

    run, params = jax.jit(served.run), jax.device_put(served.params)
    largest = 0.0
    for batch in batches:
        wanted = jax.device_get(run(params, batch))
        for name, found in predict(batch).items():
            want = wanted[name]
            seen = ~(want <= LEAST_LOGIT)  # NaN is compared
            if BLANKS not in batch and found.shape[:2] == batch["input_ids"].shape:
                real = batch["attention_mask"] > 0
                seen = seen & real.reshape(*real.shape, *(1,) * (found.ndim - 2))
            away = np.abs(np.where(seen, found - want, 0.0))
            if not np.isfinite(away).all():
                whose = "what was written" if np.isfinite(want).all() else "the model"
                raise UserError(f"{name} of {whose} are not finite numbers")
            largest = max(largest, float(away.max()))
    return largest
