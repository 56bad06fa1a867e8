# SPDX-License-Identifier: Apache-2.0
"""Turns of conversations: a sequence is an answer and as many turns before it as fit
(Bao et al. 2021, PLATO-XL, arXiv 2109.09519, section 3).

A document is a conversation, a sentence is a turn, and speakers i64 [S] names the
speaker of each: 1, 2, ... in a conversation, 0 for sentences of knowledge, which come
first. Every turn that has a context is the answer of one sequence, so that the number
of sequences is known:

    cls knowledge sep turn sep turn sep | cls answer sep

An answer has at most `target` slots, its cls and sep included: a longer one loses its
end and its sep. The context gets the slots that an answer leaves of a row, at most
`context` slots: whole turns, of which the oldest are left out. Knowledge gets at most
half of what the longest answer leaves; longer knowledge loses its end.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from bertjax.data.ragged import ramps
from bertjax.data.sequences import chunks
from bertjax.data.sequences.chunks import Block, Parts

KNOWN = 0  # the speaker of sentences of knowledge
CONTEXT, ANSWER, KNOWLEDGE = 0, 1, 2  # token types


class Limits(NamedTuple):
    """target: slots of an answer. context: slots of a context. predictions: tokens that
    all answers of a packed row may predict together; a sequence occupies at least the
    share of the row that it uses of these predictions."""

    target: int
    context: int
    predictions: int

    def known(self, length: int) -> int:
        """Return the most tokens of knowledge in a row of `length` slots."""
        return max(min(self.context, length - self.target) // 2 - 1, 0)


def turn_blocks(
    text: Any, length: int, limits: Limits, skipped: Counter[str]
) -> Iterator[Block]:
    """Yield a sequence for each turn that has a context: sentences [start, stop), the
    last of which is the answer; what is left out is added to `skipped`.

    text: has `speakers` [S] besides its offsets.
    """
    for low in range(0, len(text.documents) - 1, chunks.WINDOW):
        edges = np.asarray(text.documents[low : low + chunks.WINDOW + 1])
        first, last = int(edges[0]), int(edges[-1])
        ends = np.asarray(text.sentences[first : last + 1])
        known = np.asarray(text.speakers[first:last]) == KNOWN
        turns, begins = np.diff(edges), edges[:-1] - first
        document = np.repeat(np.arange(len(turns)), turns)
        opening = begins + np.add.reduceat(known.astype(np.int64), begins)
        skipped["conversations of a single turn"] += int((turns == 1).sum())
        at = np.flatnonzero(~known)
        at = at[at > begins[document[at]]]
        whole = ends[opening] - ends[begins]
        kept = np.minimum(whole, limits.known(length))
        skipped["tokens of knowledge"] += int((whole - kept).sum())

        # Each turn with its sep: a context holds as many of the last turns as fit.
        filled = ends - ends[0] + np.arange(len(ends))
        own, tokens = document[at], ends[at + 1] - ends[at]
        # With cls and sep; an answer that is cut has no sep.
        answer = np.minimum(tokens + 2, limits.target)
        before = 1 + kept[own] + (kept[own] > 0)
        fits = np.minimum(limits.context, length - answer) - before
        start = np.searchsorted(filled, filled[at] - fits)
        start = np.minimum(np.maximum(start, opening[own]), at)
        vanished = (start == at) & (at > opening[own])
        skipped["turns whose context does not fit"] += int(vanished.sum())
        tokens, answer, before, at, own, start = (
            x[~vanished] for x in (tokens, answer, before, at, own, start)
        )
        skipped["oldest turns of contexts"] += int((start - opening[own]).sum())
        skipped["tokens of answers"] += int(
            np.maximum(tokens + 1 - limits.target, 0).sum()
        )
        size = before + filled[at] - filled[start] + answer
        # The predictions of a row must not run out before its slots do.
        share = -(-(answer - 1) * length // limits.predictions)
        yield Block(start + first, at + first + 1, np.maximum(size, share), own + low)
        chunks.release(text.documents, text.sentences, text.speakers)


def find_parts(
    text: Any, first: np.ndarray, stop: np.ndarray, document: np.ndarray
) -> Parts:
    """Return the parts of sequences of the sentences [first, stop) in documents, [k].

    text: a plan of turns. Values of a part are: its token type, CONTEXT, ANSWER or
    KNOWLEDGE; its role, 0 for the speaker of the answer, 1, 2, ... for the others, by
    how recently they spoke; and its distance to the answer in turns, 0 for the answer.
    """
    tok, begin = text.sentences, text.documents[document]
    known, target = text.limits.known(text.length), text.limits.target
    opening = begin.copy()
    while (more := (opening < stop - 1) & (text.speakers[opening] == KNOWN)).any():
        opening[more] += 1
    kept = np.minimum(tok[opening] - tok[begin], known)
    has_known = kept > 0
    count = has_known + stop - first
    of = np.repeat(np.arange(len(first)), count)
    nth = ramps(count)
    is_known = (nth == 0) & has_known[of]
    sentence = np.where(is_known, begin[of], first[of] + nth - has_known[of])
    is_answer = sentence == stop[of] - 1
    start = tok[sentence]
    end = np.where(is_known, start + kept[of], tok[sentence + 1])
    cut = is_answer & (end - start > target - 2)
    end = np.where(cut, np.minimum(end, start + target - 1), end)
    kind = np.where(is_known, KNOWLEDGE, np.where(is_answer, ANSWER, CONTEXT))
    speaker = np.where(is_known, KNOWN, text.speakers[sentence].astype(np.int64))
    turn = np.where(is_known, 0, stop[of] - 1 - sentence)
    roles = find_roles(of, speaker)
    values = {"token_type_ids": kind, "role_ids": roles, "turn_ids": turn}
    return Parts(start, end, of, (nth == 0) | is_answer, ~cut, values)


def find_roles(of: np.ndarray, speaker: np.ndarray) -> np.ndarray:
    """Return the role of each turn, i64 [p].

    of: the conversation of each turn; its last turn is the answer. speaker: 0 for
    knowledge, whose role is 0. The role of a speaker is the number of other speakers
    who spoke after their last turn: 0 for the speaker of the answer. If two speakers
    alternate, the role of turn i of N is (N - i) mod 2, as in PLATO-XL's code.

    >>> find_roles(np.zeros(6, int), np.array([1, 2, 3, 2, 2, 1])).tolist()
    [0, 1, 2, 1, 1, 0]
    """
    role, turns = np.zeros(len(of), np.int64), np.flatnonzero(speaker != KNOWN)
    if not turns.size:
        return role
    order = turns[np.lexsort((turns, speaker[turns], of[turns]))]
    # Runs of one speaker in a conversation; the last turn of a run counts.
    changes = (np.diff(of[order]) != 0) | (np.diff(speaker[order]) != 0)
    run = np.append(0, np.cumsum(changes))
    latest = order[np.append(np.flatnonzero(changes), len(order) - 1)]
    ranked = np.lexsort((-latest, of[latest]))
    new = np.append(True, np.diff(of[latest[ranked]]) != 0)
    place = np.arange(len(ranked))
    rank = np.empty(len(ranked), np.int64)
    rank[ranked] = place - np.maximum.accumulate(np.where(new, place, 0))
    role[order] = rank[run]
    return role
