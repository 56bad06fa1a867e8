# SPDX-License-Identifier: Apache-2.0
"""Draw randomness by hashing counters, so that every number has an address.

A key is a u64 that `fold` computes from a seed and the names or numbers of what is
drawn: (seed, epoch, example, operation). A slot counts the draws under one key. The
same address gives the same number on every host, in every order, in every version of
every library: nothing here calls a random generator, and golden values in the tests pin
the bits. All functions are vectorized and broadcast their arguments.

The mixer is the finalizer of splitmix64 (Steele, Lea, Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014, with Stafford's "Mix13" constants).
It is a bijection of u64 with good avalanche; it is not cryptography.
"""

import functools
import hashlib

import numpy as np
from numpy.typing import ArrayLike

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads small counters
_PART = np.uint64(0xD1B54A32D192ED03)  # separates the inputs of fold from those of bits
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32, _S11 = (np.uint64(s) for s in (27, 30, 31, 32, 11))
# numpy constants: converting a Python number costs time in every call on a small array.
_LOW32 = np.uint64(0xFFFFFFFF)
_S1 = np.uint64(1)


def _mix(x: np.ndarray) -> np.ndarray:
    """Scramble a u64 array in place and return it."""
    t = x >> _S30
    x ^= t
    x *= _M1
    np.right_shift(x, _S27, out=t)
    x ^= t
    x *= _M2
    np.right_shift(x, _S31, out=t)
    x ^= t
    return x


@functools.lru_cache(maxsize=256)
def _mixed_name(word: str) -> np.ndarray:
    number = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return _mix(_u64(int.from_bytes(number)) + _PART)


def _u64(value: ArrayLike) -> np.ndarray:
    """Return a u64 array, never 0-d: numpy warns when a scalar overflows."""
    if isinstance(value, int):
        value = value & 0xFFFFFFFFFFFFFFFF
        return np.array([value], np.uint64)
    return np.atleast_1d(np.asarray(value)).astype(np.uint64, copy=False)


def _shaped(result: np.ndarray, *inputs: ArrayLike | str) -> np.ndarray:
    """Return a scalar if every input is one."""
    if all(isinstance(i, str) or np.ndim(i) == 0 for i in inputs):
        return result[0]
    return result


def fold(seed: ArrayLike, *parts: ArrayLike | str) -> np.ndarray:
    """Compute keys u64 from a seed or keys and the parts of an address, in order.

    A part is an int, an integer array, or the short name of an operation. Shapes
    broadcast; if all inputs are scalars, so is the result.

    >>> fold(7, 0, "mask") == fold(fold(7, 0), "mask")
    np.True_
    >>> fold(7, "order", np.arange(3)).shape
    (3,)
    """
    key = _u64(seed)
    for part in parts:
        named = isinstance(part, str)
        mixed = _mixed_name(part) if named else _mix(_u64(part) + _PART)
        key = _mix((key ^ mixed) * _M2 + _PART)
    return _shaped(key, seed, *parts)


def bits(key: ArrayLike, slot: ArrayLike) -> np.ndarray:
    """Return 64 random bits for each (key, slot), broadcast together."""
    return _shaped(_mix(_u64(key) + (_u64(slot) + _S1) * _GOLDEN), key, slot)


def _below(word: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Scale u64 words to [0, n): the high word of the 64 x 32 bit product."""
    high = (word >> _S32) * n
    low = (word & _LOW32) * n >> _S32
    return (high + low) >> _S32


def below(key: ArrayLike, slot: ArrayLike, n: ArrayLike) -> np.ndarray:
    """Draw integers i64 in [0, n) for 1 <= n <= 2^32.

    The whole 64-bit word is multiplied by n and the high word is kept, so that the
    probabilities of two values differ by at most n / 2^64 relatively.
    """
    word = _mix(_u64(key) + (_u64(slot) + _S1) * _GOLDEN)
    return _shaped(_below(word, _u64(n)).astype(np.int64), key, slot, n)


def uniform(key: ArrayLike, slot: ArrayLike) -> np.ndarray:
    """Draw f64 in [0, 1), multiples of 2^-53."""
    word = _mix(_u64(key) + (_u64(slot) + _S1) * _GOLDEN)
    return _shaped((word >> _S11).astype(np.float64) * 2.0**-53, key, slot)


def binomial_half(key: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Count the heads in k[i] fair coins under key[i]: i64 [b].

    The coins are the bits of the words (key, 0), (key, 1), ..., so this is exact for
    any k, without a table and without approximation.
    """
    k = np.asarray(k, np.int64)
    rows = np.flatnonzero(k > 0)
    heads = np.zeros(k.shape, np.int64)
    if not rows.size:
        return heads
    words = (k[rows] + 63) // 64
    first = np.cumsum(words) - words
    slot = np.arange(words.sum()) - np.repeat(first, words)
    word = bits(np.repeat(_u64(key)[rows], words), slot)
    spare = np.maximum(64 * (slot + 1) - np.repeat(k[rows], words), 0)
    ones = np.bitwise_count(word >> spare.astype(np.uint64))
    heads[rows] = np.add.reduceat(ones.astype(np.int64), first)
    return heads


def permute(index: ArrayLike, n: int, key: ArrayLike) -> np.ndarray:
    """Map index to its place under a seeded bijection of [0, n): i64, 1 <= n <= 2^40.

    It needs no table: a Feistel network works on pairs (x mod a, x div a) with
    a = ceil(sqrt(n)), adds modulo the two sides, and is repeated for the few results in
    [n, a * b) (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002). `key` is one key, or one for each index.

    >>> permute(np.arange(5), 5, fold(0, "order", 0)).tolist()
    [1, 3, 2, 0, 4]
    """
    if not 1 <= n <= 2**40:
        raise ValueError(f"permute needs 1 <= n <= 2^40, not {n}")
    a = int(np.ceil(np.sqrt(n)))
    b = -(-n // a)
    sides = np.uint64(a), np.uint64(b)
    rounds = 24 if n < 4096 else 6  # tiny sides mix slowly: chi-square tests need 24
    x = np.array(_u64(index))
    keys = np.broadcast_to(_u64(key), x.shape)
    todo = np.arange(x.size)
    value, key_now = x.reshape(-1), keys.reshape(-1)
    out = value.copy()
    while todo.size:
        half = [value % sides[0], value // sides[0]]
        for turn in range(rounds):
            this, other = turn % 2, 1 - turn % 2
            word = _mix((half[other] + np.uint64(turn << 40)) * _GOLDEN + key_now)
            half[this] += _below(word, sides[this])
            half[this] -= sides[this] * (half[this] >= sides[this])
        value = half[1] * sides[0] + half[0]
        out[todo] = value
        outside = value >= n
        todo, value, key_now = todo[outside], value[outside], key_now[outside]
    return _shaped(out.reshape(x.shape).astype(np.int64), index, key)
