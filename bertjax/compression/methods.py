# SPDX-License-Identifier: Apache-2.0
"""The methods by name, and what is asked of one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError, registry
from bertjax.compression import quantize, sparse
from bertjax.compression.quantize import Quantized
from bertjax.compression.sparse import Pattern

BITS = (8, 4, 3)
ROWS = 2048  # of a table at once
EMBEDDINGS = {"8": "in 8 bits", "same": "as the layers are", "dense": "untouched"}


class Method(NamedTuple):
    """A way of compressing one matrix.

    prunes: it removes weights; others quantise. calibrated: it reads the Hessian of the
    inputs. apply: (weights [in, out][, hessian [in, in]], pattern | bits, group size).
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
    """What is done to a model: a method, and how far it goes.

    pattern: of methods that prune, else None; bits, group_size: of those that quantise,
    else 0. embeddings: a key of EMBEDDINGS, of the tables of words, positions and types
    and of an output matrix of its own.
    """

    method: str
    pattern: Pattern | None = None
    bits: int = 0
    group_size: int = 0
    embeddings: str = "8"

    @property
    def calibrated(self) -> bool:
        """Whether calibration texts are read."""
        return METHODS[self.method].calibrated

    @property
    def degree(self) -> str:
        """How far it goes, for people: 50%, 2:4, 3 bits."""
        if self.pattern is None:
            return f"{self.bits} bits"
        share = f"{100 * self.pattern.share:g}%"  # which no other share has
        return str(self.pattern) if self.pattern.group else share

    def compress(
        self, weights: np.ndarray, hessian: np.ndarray | None
    ) -> np.ndarray | Quantized:
        """Compress a matrix, f32 [in, out]; hessian [in, in] of a calibrated method.

        Raises UserError where groups of the pattern do not divide its inputs.
        """
        method = METHODS[self.method]
        given = (weights, hessian) if method.calibrated else (weights,)
        if self.pattern is None:
            return method.apply(*given, self.bits, min(self.group_size, len(weights)))
        check_groups(self.pattern, len(weights))
        return method.apply(*given, self.pattern)

    def compress_table(self, table: np.ndarray) -> np.ndarray | Quantized | None:
        """Compress a table of embeddings, f32 [V, E], each row by itself: no input of
        it calls for other than its nearest weights. None: it stays."""
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
    """Refuse a pattern whose groups do not divide the inputs of a matrix: UserError."""
    if pattern.group and inputs % pattern.group:
        raise UserError(
            f"--sparsity={pattern}: a matrix of the model has {inputs} inputs, which "
            f"groups of {pattern.group} do not divide"
        )


def read_bits(text: str) -> int:
    """Return the number that --bits is. Raises UserError."""
    if not text.isdecimal():
        raise UserError(f"--bits={text} is no number of bits")
    return int(text)


def make_recipe(
    method: str,
    sparsity: str | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    embeddings: str = "8",
) -> Recipe:
    """Make a recipe of what flags say; None: not given. Raises UserError."""
    registry.pick("--method", method, METHODS)
    registry.pick("--embeddings", embeddings, EMBEDDINGS)
    if METHODS[method].prunes:
        for flag, value in (("bits", bits), ("group_size", group_size)):
            if value is not None:
                raise UserError(f"--{flag}={value}: {method} prunes: leave it out")
        pattern = sparse.read_pattern(sparsity or "0.5")
        return Recipe(method, pattern, embeddings=embeddings)
    if sparsity is not None:
        raise UserError(f"--sparsity={sparsity}: {method} quantises: leave it out")
    if bits is None:
        bits = 4
    if bits not in BITS:
        raise UserError(f"--bits={bits}: give one of {', '.join(map(str, BITS))}")
    return Recipe(
        method, bits=bits, group_size=group_size or 128, embeddings=embeddings
    )
