# SPDX-License-Identifier: Apache-2.0
"""Labels of the tokens that belong to a concept, which heads learn or unlearn.

The labels come from the marks of the store (data.concept, data.control) and are created
with the predictions of a masked LM; objectives/concept.py reads them.
"""

from typing import Any

import numpy as np

from bertjax.data.features.base import Batch, GatheredRows, Spec, Specs
from bertjax.data.token_flags import MARKED


def names_of(data: Any) -> list[str]:
    """Return the names in MARKED that are set in a config's data."""
    return [name for name in MARKED if data[name]]


def label_specs(names: list[str], P: int, gathered: Specs) -> dict[str, Spec]:
    """Return the arrays of `make_labels`, none without names; gathered: the plan's."""
    texts = gathered["cls_positions"].shape if "cls_positions" in gathered else ()
    specs = {}
    for name in names:
        specs |= {f"{name}_labels": Spec((P,)), f"{name}_texts": Spec(texts)}
    return specs | ({"phase_progress": Spec((), "float32")} if names else {})


def make_labels(names: list[str], rows: GatheredRows, positions: np.ndarray) -> Batch:
    """Return the labels of each concept.

    `<name>_labels` i32 [b, P] is 1 if the token at `positions`, i32 [b, P], is part of
    a word of the concept; `<name>_texts` i32 [b] is 1 if the row has any such word (in
    packed rows [b, S], if the sequence has). `phase_progress` f32 [b] is the share of
    the phase that is over, 1 in evaluations, for weights that grow with training.

    Worked example, one concept word marked at column 2, positions 2 4: labels 1 0,
    texts 1.
    """
    if not names:
        return {}
    marks = rows.arrays.get("marks")
    if marks is None:  # a made-up text has no marks
        marks = np.zeros(rows.arrays["input_ids"].shape, np.uint8)
    batch: Batch = {}
    for name in names:
        flags = ((marks & MARKED[name]) > 0).astype(np.int32)
        batch[f"{name}_labels"] = np.take_along_axis(flags, positions, axis=1)
        batch[f"{name}_texts"] = _any_of_texts(flags, rows.arrays)
    progress = np.full(len(positions), rows.progress, np.float32)
    return batch | {"phase_progress": progress}


def _any_of_texts(flags: np.ndarray, arrays: Batch) -> np.ndarray:
    """Return which texts have a flag, i32 [b], in packed rows [b, S]; flags [b, L]."""
    if "cls_positions" not in arrays:
        return flags.max(axis=1)
    # Column 0 collects the padding.
    found = np.zeros((len(flags), arrays["cls_positions"].shape[1] + 1), np.int32)
    row, column = np.nonzero(flags)
    found[row, arrays["segment_ids"][row, column]] = 1
    return found[:, 1:]
