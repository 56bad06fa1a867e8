# SPDX-License-Identifier: Apache-2.0
"""Find where the sequences of a text begin and end, one window of the text at a time.

A text is any object with two arrays of offsets, which may be memory maps of any size:
`sentences` [S+1] (token offsets) and `documents` [D+1] (sentence offsets), both from 0
to the total and strictly increasing. Pages that were read are released.
"""

import mmap
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from bertjax.data import counter_rng

WINDOW = 1 << 20  # offsets handled together: bounds the memory, changes no result
LARGE = 1 << 30  # bytes; a smaller map is best read ahead, whatever the access pattern
_FAR = np.iinfo(np.int64).max


class Block(NamedTuple):
    """Sequences in order, each array i64 [k]: sequence i is [start, stop) in tokens, or
    in sentences for pairs and turns; `slots` is the number of slots that it occupies,
    special tokens included; `document` is the one it begins in, if `gather` needs
    it."""

    start: np.ndarray
    stop: np.ndarray
    slots: np.ndarray
    document: np.ndarray | None = None


class Parts(NamedTuple):
    """Token ranges in order, each [p]; `of` is the sequence of each, non-decreasing.

    opens, closes: bool [p], whether cls precedes a part and sep follows it; None: cls
    before the first part of a sequence, sep after every part. values: numbers [p] by
    name, which rows have in all slots of a part, i32.
    """

    start: np.ndarray
    stop: np.ndarray
    of: np.ndarray
    opens: np.ndarray | None = None
    closes: np.ndarray | None = None
    values: Mapping[str, np.ndarray] = MappingProxyType({})


def advise(array: np.ndarray | None, advice: str, least: int = LARGE) -> None:
    """Tell the system how the map under an array is used, if it has `least` bytes.

    MADV_RANDOM: read single pages, without read-ahead (256 random rows of 128 from
    10^10 tokens on a cold disk: 2 ms instead of 100). MADV_NORMAL: read ahead. A
    private map is left alone, because it would lose what was written to it.
    """
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and array.mode == "c":
            return
        array = array.base
    if isinstance(array, mmap.mmap) and len(array) >= least and hasattr(mmap, advice):
        array.madvise(getattr(mmap, advice))


def release(*arrays: np.ndarray) -> None:
    """Release the pages of read-only maps; they stay in the disk cache.

    A pass over a large file then needs memory for one window of it only.
    """
    for array in arrays:
        advise(array, "MADV_DONTNEED", 0)


def is_clean(offsets: np.ndarray) -> bool:
    """Return whether offsets strictly increase, so that nothing is empty."""
    for low in range(0, len(offsets) - 1, WINDOW):
        if not (np.diff(offsets[low : low + WINDOW + 1]) > 0).all():
            return False
        release(offsets)
    return True


def document_blocks(text: Any, length: int) -> Iterator[Block]:
    """Yield one sequence per document; a longer one is cut every length - 2 tokens.

    Documents of 3 and 6 tokens at length 6 (room for 4): [0, 3) [3, 7) [7, 9).
    """
    room = length - 2
    for low in range(0, len(text.documents) - 1, WINDOW):
        edges = text.sentences[text.documents[low : low + WINDOW + 1]]
        start = _cut(edges, room)
        yield Block(start[:-1], start[1:], np.diff(start) + 2)
        release(text.documents, text.sentences)


def _cut(offsets: np.ndarray, room: int) -> np.ndarray:
    """Insert offsets between neighboring offsets that are more than `room` apart."""
    more = (np.diff(offsets) - 1) // room
    long = np.flatnonzero(more)
    if not long.size:
        return offsets
    count = more[long]
    before = np.repeat(long, count)  # the offset that each new one follows
    nth = np.arange(len(before)) - np.searchsorted(before, before) + 1
    return np.insert(offsets, before + 1, offsets[before] + nth * room)


def sentence_blocks(
    text: Any, length: int, cross: bool, whole: bool = True
) -> Iterator[Block]:
    """Yield sequences of as many whole sentences as fit, across documents if `cross`.

    Sentences longer than the room are cut into pieces of that size. If not `whole`, a
    sequence also has what fits of the next sentence of its document, and the sequence
    after it begins with that sentence all the same.

    Each change of document shifts the tokens after it by a gap: by one separator, or by
    more than a row if sequences must not cross documents. Then a piece fits if its
    shifted end does.
    """
    tok, room = text.sentences, length - 2
    gap = 1 if cross else room + 1
    begin = 0
    for low in range(0, len(tok) - 1, WINDOW):
        high = min(low + WINDOW, len(tok) - 1)
        # A sequence that begins before `high` ends at most `room` and a piece later.
        last = int(np.searchsorted(tok, min(tok[high] + 2 * room, tok[-1])))
        base = int(tok[low])
        window = tok[low : last + 1] - base
        bounds = _cut(window, room)
        document, edges = _documents(text, low, last)
        edges = edges - low
        if len(bounds) > len(window):
            edges = np.searchsorted(bounds, window[edges])
        moved = np.zeros(len(bounds) - 1, np.int64)
        moved[edges[edges < len(moved)]] = gap
        moved = np.cumsum(moved)
        starts, ends = bounds[:-1] + moved, np.append(bounds[1:] + moved, _FAR)
        i, stop = np.searchsorted(bounds, (begin - base, window[high - low])).tolist()
        visited, i = walk(ends, starts[:stop] + room, i, stop)
        begin = base + int(bounds[i])
        after = np.append(visited[1:], i)[: len(visited)]
        slots = ends[after - 1] - starts[visited] + 2
        which = document - 1 + moved[visited] // gap
        start, stop = bounds[visited] + base, bounds[after] + base
        if not whole:
            stop = np.minimum(start + room, tok[text.documents[which + 1]])
            slots = stop - start + 2
        yield Block(start, stop, slots, which)
        release(text.documents, tok)


def _documents(text: Any, low: int, high: int) -> tuple[int, np.ndarray]:
    """Return the first document that begins in sentences [low, high], and the starts of
    all documents that begin there."""
    first, last = np.searchsorted(text.documents, (low, high + 1)).tolist()
    return first, text.documents[first:last]


# From sizes in tokens and in sentences and the targets of chunks to slots of a row.
Slots = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def pair_blocks(
    text: Any, length: int, seed: int, short: float, slots: Slots
) -> Iterator[Block]:
    """Yield chunks of sentences that reach their target (see `targets`) or the end of
    their document."""
    tok, room = text.sentences, length - 3
    begin = 0
    for low in range(0, len(tok) - 1, WINDOW):
        high = min(low + WINDOW, len(tok) - 1)
        last = min(high + room, len(tok) - 1)
        window = tok[low : last + 1] - tok[low]
        first, edges = _documents(text, low + 1, last)
        document = np.cumsum(np.bincount(edges - low, minlength=len(window)))
        # Shift documents so far that no target extends into the next one.
        moved = window + document * (room + 1)
        target = targets(seed, short, room, np.arange(low, high))
        limit = moved[: high - low] + target - 1
        visited, i = walk(moved, limit, begin - low, high - low)
        begin = low + i
        after = np.append(visited[1:], i)[: len(visited)]
        size = window[after] - window[visited]
        filled = slots(size, after - visited, target[visited])
        which = document[visited] + first - 1
        yield Block(visited + low, after + low, filled, which)
        release(text.documents, tok)


def targets(seed: int, short: float, room: int, first: np.ndarray) -> np.ndarray:
    """Return the target sizes in tokens of chunks that begin at the sentences `first`.

    The result is i64: `room`, but for a share `short` of the chunks uniform from 2 to
    `room`. BERT draws one target per document and pass. Here chunks are cut once for
    the run, so that this would give a document with a short target many times its share
    of the rows in every epoch.
    """
    key = counter_rng.fold(seed, "target", "chunk", first)
    target = np.full(len(first), room)
    at = np.flatnonzero(counter_rng.uniform(key, 0) < short)
    target[at] = 2 + counter_rng.below(key[at], 1, room - 1)
    return target


def walk(
    ends: np.ndarray, limit: np.ndarray, i: int, stop: int
) -> tuple[np.ndarray, int]:
    """Go from i to the first j > i with ends[j] > limit[i] until `stop` is reached.

    Returns the visited places below `stop`, i64, and the first one not below it. `ends`
    increases, and ends[i] <= limit[i] for `limit` [stop].

    >>> visited, following = walk(np.arange(1, 9), np.arange(8) + 3, 1, 8)
    >>> visited.tolist(), following
    ([1, 4, 7], 8)
    """
    after = np.searchsorted(ends, limit[:stop], "right").item
    visited = []
    while i < stop:
        visited.append(i)
        i = after(i)
    return np.array(visited, np.int64), i


def follow(
    ends: np.ndarray, limit: np.ndarray, most: int, now: np.ndarray
) -> np.ndarray:
    """Return the first j > now with ends[j] > limit, i64 [k]; it is at most now + most.

    A binary search over `most`: unlike one over all `ends`, it reads few pages of them.
    """
    at = now.copy()
    step = 1 << (most.bit_length() - 1)
    while step:
        at += step * (ends.take(at + step, mode="clip") <= limit)
        step >>= 1
    return at + 1
