# SPDX-License-Identifier: Apache-2.0
"""Choose layers of a deeper model for a shallower one (init_layers)."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from bertjax import UserError, counted

LAYERS = "encoder/layers/"
TYPES = "encoder/embeddings/token_type"


def even_layers(depth: int, count: int) -> list[int]:
    """Spread `count` layers evenly from the first to the last of `depth`.

    >>> even_layers(12, 6)  # DistilBERT's
    [0, 2, 4, 7, 9, 11]
    >>> even_layers(4, 2)
    [0, 3]
    """
    step = (depth - 1) / max(count - 1, 1)
    return [math.floor(i * step + 0.5) for i in range(count)]


def read_layers(text: str) -> list[int] | None:
    """Parse init_layers: None for "even", otherwise numbers. Raises UserError."""
    if text == "even":
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(
            f"init_layers={text} is neither 'even' nor layer numbers, such as "
            "0,2,4,7,9,11"
        )
    return [int(part) for part in parts]


class ChosenLayers:
    """Another model's parameters with only the chosen layers.

    source: has describe() -> {path: shape} and read(path); wanted: the shapes of the
    parameters to initialize. Token types are dropped if these have none, as in
    DistilBERT. Raises UserError if the layers cannot be chosen so.
    """

    def __init__(
        self, source: Any, text: str, wanted: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.source, self.wanted = source, wanted
        self.shapes = dict(source.describe())
        if TYPES not in wanted:
            self.shapes.pop(TYPES, None)
        depth, count = (
            max((s[0] for k, s in some.items() if k.startswith(LAYERS)), default=0)
            for some in (self.shapes, wanted)
        )
        given = read_layers(text)
        self.depth = depth
        self.layers = even_layers(depth, count) if given is None else given
        where = f"init_layers={text}: {source}"
        if count > depth:
            raise UserError(
                f"{where} has {counted(depth, 'layer')}, this model {count}"
            )
        if len(self.layers) != count:
            raise UserError(
                f"init_layers={text} names {counted(len(self.layers), 'layer')}, and "
                f"the model has {count}"
            )
        if max(self.layers, default=0) >= depth:
            which = f"from 0 to {depth - 1}" if depth > 1 else "0"
            raise UserError(f"{where} has {counted(depth, 'layer')}, {which}")

    def __str__(self) -> str:
        return f"{self.source}, layers {', '.join(map(str, self.layers))}"

    def _rows(self, path: str) -> list[int]:
        """Return the entries of a stacked leaf to use.

        The first layers of either model may lack a leaf; with U-Net skips
        half of the layers do.
        """
        lacking = self.depth - self.shapes[path][0]
        count = len(self.layers)
        own = self.layers[count - self.wanted.get(path, (count,))[0] :]
        return [layer - lacking for layer in own if layer >= lacking]

    def describe(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the leaves by path."""
        return {
            path: (len(self._rows(path)), *shape[1:])
            if path.startswith(LAYERS)
            else shape
            for path, shape in self.shapes.items()
        }

    def read(self, path: str) -> np.ndarray:
        """Read one leaf."""
        values = self.source.read(path)
        return values[self._rows(path)] if path.startswith(LAYERS) else values
