# SPDX-License-Identifier: Apache-2.0
"""The compression methods by name, and recipes made from flags."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError, registry
from bertjax.compression import quantize, sparse
from bertjax.compression.quantize import Quantized
from bertjax.compression.sparse import Pattern

BITS = (8, 4, 3)
ROWS = 2048  # rows of a table per step
EMBEDDINGS = {"8": "in 8 bits", "same": "as the layers are", "dense": "untouched"}


class Method(NamedTuple):
    """A method of compressing one matrix.

    prunes: it removes weights; the other methods quantize. calibrated: it reads the
    Hessian of the inputs. apply: a function of (weights [in, out][, hessian [in, in]],
    pattern), or with (bits, group size) instead of the pattern.
    """

    prunes: bool
    calibrated: bool
    apply: Callable[..., Any]


METHODS = {
    "sparsegpt": Method(True, True, sparse.sparsegpt),
    "wanda": Method(True, True, sparse.wanda),
    "magnitude": Method(True, False, sparse.magnitude),
    "gptq": Method(False, True, quantize.gptq),
    "awq": Method(False, True, quantize.awq),
    "rtn": Method(False, False, quantize.rtn),
}


@dataclass(frozen=True)
class Recipe:
    """How a model is compressed: a method and its degree.

    pattern: for methods that prune, otherwise None; bits, group_size: for methods that
    quantize, otherwise 0. embeddings: a key of EMBEDDINGS; it applies to the tables of
    words, positions and types, and to an untied output matrix.
    """

    method: str
    pattern: Pattern | None = None
    bits: int = 0
    group_size: int = 0
    embeddings: str = "8"

    @property
    def calibrated(self) -> bool:
        """Whether the method needs calibration texts."""
        return METHODS[self.method].calibrated

    @property
    def degree(self) -> str:
        """The degree in readable form: 50%, 2:4, 3 bits."""
        if self.pattern is None:
            return f"{self.bits} bits"
        share = f"{100 * self.pattern.share:g}%"  # different for each share
        return str(self.pattern) if self.pattern.group else share

    def compress(
        self, weights: np.ndarray, hessian: np.ndarray | None
    ) -> np.ndarray | Quantized:
        """Compress a matrix, f32 [in, out]; calibrated methods read hessian [in, in].

        Raises UserError if the groups of the pattern do not divide the inputs.
        """
        method = METHODS[self.method]
        given = (weights, hessian) if method.calibrated else (weights,)
        if self.pattern is None:
            return method.apply(*given, self.bits, min(self.group_size, len(weights)))
        check_groups(self.pattern, len(weights))
        return method.apply(*given, self.pattern)

    def compress_table(self, table: np.ndarray) -> np.ndarray | Quantized | None:
        """Compress an embedding table, f32 [V, E], each row separately.

        Rounding to nearest is the best here: a lookup reads one row, so no other
        weights could compensate for an error. Returns None if the table stays dense.
        """
        if self.embeddings == "dense":
            return None
        width = table.shape[1]
        if self.embeddings == "same" and self.pattern is not None:
            check_groups(self.pattern, width)
            return sparse.magnitude(table.T, self.pattern)
        bits = self.bits if self.embeddings == "same" else 8
        how = bits, min(self.group_size or 128, width)
        starts = range(0, len(table), ROWS)
        parts = [quantize.rtn(table[at : at + ROWS].T, *how) for at in starts]
        codes, scales, zeros = (
            np.concatenate([part[i] for part in parts], axis=1) for i in range(3)
        )
        return Quantized(codes, scales, zeros, None, how[1], bits)


def check_groups(pattern: Pattern, inputs: int) -> None:
    """Raise UserError if the pattern's groups do not divide the inputs of a matrix."""
    if pattern.group and inputs % pattern.group:
        raise UserError(
            f"--sparsity={pattern}: a matrix of the model has {inputs} inputs, which "
            f"groups of {pattern.group} do not divide"
        )


def read_bits(text: str) -> int:
    """Parse --bits. Raises UserError if it is not a whole number."""
    if not text.isdecimal():
        raise UserError(f"--bits={text} is not a number of bits")
    return int(text)


def make_recipe(
    method: str,
    sparsity: str | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    embeddings: str = "8",
) -> Recipe:
    """Return the recipe for flags; None: not given. Raises UserError."""
    registry.pick("--method", method, METHODS)
    registry.pick("--embeddings", embeddings, EMBEDDINGS)
    if METHODS[method].prunes:
        for flag, value in (("bits", bits), ("group_size", group_size)):
            if value is not None:
                raise UserError(f"--{flag}={value}: {method} prunes: leave it out")
        pattern = sparse.read_pattern(sparsity or "0.5")
        return Recipe(method, pattern, embeddings=embeddings)
    if sparsity is not None:
        raise UserError(f"--sparsity={sparsity}: {method} quantizes: leave it out")
    bits = 4 if bits is None else bits
    if bits not in BITS:
        raise UserError(f"--bits={bits}: give one of {', '.join(map(str, BITS))}")
    return Recipe(
        method, bits=bits, group_size=group_size or 128, embeddings=embeddings
    )
