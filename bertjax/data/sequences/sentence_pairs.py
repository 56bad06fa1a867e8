# SPDX-License-Identifier: Apache-2.0
"""Split chunks into sentence pairs: the rules that label them, and truncation.

This is BERT's create_pretraining_data (Devlin et al. 2019, appendix A.2) with two
changes. Chunk boundaries are drawn once for the run, where the official code rechunks
in each pass; and it rewinds after a random partner, which is not done here. The split,
the coin, the random partner and the side of truncation are drawn for each (epoch,
example).
"""

from typing import NamedTuple

import numpy as np

from bertjax.data import counter_rng
from bertjax.data.sequences import chunks


class Chunks(NamedTuple):
    """The chunks that a pair rule works on, each array [k]: their keys and documents,
    their sentences [start, stop), of which those before `split` are A, and the number
    of tokens that a pair should reach, at most `room`. `sentences` and `documents` are
    the offsets of the text."""

    sentences: np.ndarray
    documents: np.ndarray
    keys: np.ndarray
    document: np.ndarray
    start: np.ndarray
    split: np.ndarray
    stop: np.ndarray
    target: np.ndarray
    room: int


class Pairs(NamedTuple):
    """The token ranges of A and B, i64 [k, 2], and the rule's labels, i32 [k]."""

    start: np.ndarray
    stop: np.ndarray
    labels: dict[str, np.ndarray]


def in_order(c: Chunks) -> Pairs:
    """Use the rest of the chunk as B, without a label; a single sentence has no B."""
    edges = c.sentences[np.stack([c.start, c.split, c.stop], 1)]
    return Pairs(edges[:, :2].copy(), edges[:, 1:].copy(), {})


def _next_sentence(c: Chunks) -> Pairs:
    """Let B follow A (label 0), or draw B from another document (label 1).

    Devlin et al. 2019, section 3.1, task 2. A fair coin decides; B is always random if
    the chunk is one sentence. If there is only one document the partner comes from it,
    but is not the true next sentence unless there is no other.
    """
    tok, docs = c.sentences, c.documents
    key = counter_rng.fold(c.keys, "next")
    random = (c.split == c.stop) | (counter_rng.bits(key, 0) >> np.uint64(63) == 1)
    n = len(docs) - 1
    if n > 1:
        other = counter_rng.below(key, 1, n - 1)
        other += other >= c.document
        first, size = docs[other], docs[other + 1] - docs[other]
        begin = first + counter_rng.below(key, 2, size)
    else:
        other, size = c.document, docs[1]
        shun = (c.split < size) & (size > 1)
        begin = counter_rng.below(key, 2, size - shun)
        begin += shun & (begin >= c.split)
    missing = c.target - (tok[c.split] - tok[c.start])
    # At least one sentence; each has a token, so that `room` bounds the search.
    end = chunks.follow(tok, tok[begin] + missing - 1, c.room, begin)
    end = np.minimum(end, docs[other + 1])
    start, stop, _ = in_order(c)
    start[random, 1], stop[random, 1] = tok[begin[random]], tok[end[random]]
    return Pairs(start, stop, {"nsp_labels": random.astype(np.int32)})


def _sentence_order(c: Chunks) -> Pairs:
    """Let B follow A (label 0), or A follow B (label 1), by a fair coin.

    Lan et al. 2020, section 3.1. The official code turns chunks of one sentence into
    pairs of two documents; here such chunks are skipped (`SKIPS_SINGLE`). As in the
    official code, the second half is slightly longer, because the chunk's last sentence
    is the one that reaches the target: on Wikipedia at L = 128 the lengths alone
    predict 54% of the labels.
    """
    swap = counter_rng.bits(counter_rng.fold(c.keys, "order"), 0) >> np.uint64(63) == 1
    start, stop, _ = in_order(c)
    start[swap], stop[swap] = start[swap, ::-1], stop[swap, ::-1]
    return Pairs(start, stop, {"sop_labels": swap.astype(np.int32)})


PAIR_RULES = {"nsp": _next_sentence, "sop": _sentence_order}
SKIPS_SINGLE = {"sop"}  # rules that need two sentences of one chunk


def trim(
    a: np.ndarray, b: np.ndarray, room: int | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Count the tokens to remove from lengths a and b, i64 [k], so that they fit.

    Closed form of "while too long, remove one from the longer; from B if equal".

    >>> [int(n) for n in trim(np.array(9), np.array(4), 8)]
    [5, 0]
    >>> [int(n) for n in trim(np.array(9), np.array(8), 8)]
    [5, 4]
    """
    excess = np.maximum(a + b - room, 0)
    first = np.minimum(excess, np.abs(a - b))
    rest = excess - first
    longer = a > b
    return first * longer + rest // 2, first * ~longer + (rest + 1) // 2
