# SPDX-License-Identifier: Apache-2.0
"""A tensor of a file, read row by row to where it is needed."""

import dataclasses
import math

import ml_dtypes
import numpy as np

# What becomes a parameter; other types are known by name alone.
DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F64": np.float64,
}
BLOCK = 2**20  # numbers read at a time
ROWS = 16  # transposed at a time: four times as fast as numpy's copy of the whole


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file. dtype: a key of DTYPES, or another name of the format's."""

    dtype: str
    shape: tuple[int, ...]

    def shape_in_file(self, shape: tuple[int, ...]) -> list[int]:
        """Return a shape in the file's own order of axes, for messages."""
        return list(shape)

    def rows(self, begin: int, end: int) -> np.ndarray:
        """Read rows [begin, end), f32 [end - begin, ...]."""
        raise NotImplementedError

    def fill(self, out: np.ndarray, transpose: bool, part: int, of: int) -> None:
        """Read the tensor, or one of `of` equal parts of its rows, into `out`.

        out: f32, contiguous, of as many elements as the part; transposed it gets
        [in, out] where the file has [out, in].
        """
        count, width = self.shape[0] // of, math.prod(self.shape[1:])
        target = out.reshape(width, count).T if transpose else out.reshape(count, width)
        step = ROWS if transpose else max(1, BLOCK // max(width, 1))
        for begin in range(0, count, step):
            end = min(begin + step, count)
            rows = self.rows(part * count + begin, part * count + end)
            target[begin:end] = rows.reshape(end - begin, width)


def are_equal(a: StoredTensor, b: StoredTensor) -> bool:
    """Compare two tensors of any kind, a block of rows at a time."""
    if a.shape != b.shape or not a.shape:
        return False
    step = max(1, BLOCK // max(math.prod(a.shape[1:]), 1))
    blocks = [(i, min(i + step, a.shape[0])) for i in range(0, a.shape[0], step)]
    return a is b or all(np.array_equal(a.rows(*x), b.rows(*x)) for x in blocks)
