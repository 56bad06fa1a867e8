# SPDX-License-Identifier: Apache-2.0
"""What of a row belongs to a concept: labels that heads learn, or unlearn.

They come from the marks of the store (data.concept, data.control) and are made beside
the predictions of a masked LM; objectives/concept.py reads them.
"""

from typing import Any

import numpy as np

from bertjax.data.features.base import Batch, GatheredRows, Spec
from bertjax.data.token_flags import MARKED


def names_of(data: Any) -> list[str]:
    """Return those of MARKED that a config's data names."""
    return [name for name in MARKED if data[name]]


def label_specs(names: list[str], P: int) -> dict[str, Spec]:
    """Return the arrays of `make_labels`, none without names."""
    specs = {}
    for name in names:
        specs |= {f"{name}_labels": Spec((P,)), f"{name}_texts": Spec(())}
    return specs | ({"phase_progress": Spec((), "float32")} if names else {})


def make_labels(names: list[str], rows: GatheredRows, positions: np.ndarray) -> Batch:
    """Say what is of each concept: `<name>_labels` i32 [b, P], 1 where the token at
    positions i32 [b, P] is part of such a word; `<name>_texts` i32 [b], 1 where the row
    has any. `phase_progress` f32 [b]: the share of the phase that lies behind, 1 in
    evaluations, for what grows with training.

    Worked example, marks of one concept word at column 2, positions 2 4: labels 1 0,
    texts 1.
    """
    if not names:
        return {}
    marks = rows.arrays.get("marks")
    if marks is None:  # of a made-up text
        marks = np.zeros(rows.arrays["input_ids"].shape, np.uint8)
    batch: Batch = {}
    for name in names:
        flags = ((marks & MARKED[name]) > 0).astype(np.int32)
        batch[f"{name}_labels"] = np.take_along_axis(flags, positions, axis=1)
        batch[f"{name}_texts"] = flags.max(axis=1)
    progress = np.full(len(positions), rows.progress, np.float32)
    return batch | {"phase_progress": progress}
