# SPDX-License-Identifier: Apache-2.0
"""Rows of turns: contexts, roles and packing, by a slow definition."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax import UserError
from bertjax.data.sequences import chunks
from bertjax.data.sequences.make_plan import make_plan
from bertjax.data.sequences.turns import ANSWER, KNOWLEDGE, Limits, find_roles

SPECIALS = SimpleNamespace(pad_id=0, cls_id=2, sep_id=3, vocab_size=10_000)
L, LIMITS = 24, Limits(8, 24, 12)


def make_store(conversations):
    """Make a store of conversations: lists of (speaker, tokens), 0 for knowledge."""
    turns = [turn for one in conversations for turn in one]
    sizes = [n for _, n in turns]
    return SimpleNamespace(
        tokens=np.arange(10, 10 + sum(sizes)),
        sentences=np.cumsum([0, *sizes]),
        documents=np.cumsum([0, *map(len, conversations)]),
        streams={"speaker": ("sentence", np.array([s for s, _ in turns]))},
    )


def draw_conversations(seed, number=30, most=9, speakers=4, known=True):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(number):
        own = [(0, int(rng.integers(1, 14)))] * int(known and rng.integers(3))
        names = rng.integers(1, speakers + 1, rng.integers(1, most))
        found.append([*own, *((int(s), int(rng.integers(1, 10))) for s in names)])
    return found


def expected_rows(store, conversations, length, limits):
    """Return ids, types, roles and turns of each example, as the module states."""
    rows, at = [], 0
    for turns in conversations:
        ids = [
            store.tokens[store.sentences[at + i] : store.sentences[at + i + 1]].tolist()
            for i in range(len(turns))
        ]
        at += len(turns)
        known = sum(s == 0 for s, _ in turns)
        facts = [token for own in ids[:known] for token in own]
        facts = facts[: limits.known(length)]
        head = [*facts, 3] if facts else []
        for t in range(max(known, 1), len(turns)):
            answer = [2, *ids[t], 3][: limits.target]
            room = min(limits.context, length - len(answer)) - 1 - len(head)
            first = t
            while (
                first > known
                and sum(map(len, ids[first - 1 : t])) + (t - first + 1) <= room
            ):
                first -= 1
            if first == t and t > known:
                continue
            spoke = [turns[i][0] for i in range(first, t + 1)]
            latest = [*dict.fromkeys(reversed(spoke))]
            row = [(i, KNOWLEDGE, 0, 0) for i in head]
            for i in range(first, t):
                role = latest.index(turns[i][0])
                row += [(token, 0, role, t - i) for token in [*ids[i], 3]]
            begin = row[0][1:]
            row = [(2, *begin), *row, *((token, ANSWER, 0, 0) for token in answer)]
            rows.append(row)
    return rows


def gathered_rows(plan, rows=None):
    """Return the same for the sequences in a plan's rows."""
    rows = np.arange(plan.n) if rows is None else rows
    arrays = plan.gather(rows, rows.astype(np.uint64), SPECIALS)
    names = ("input_ids", "token_type_ids", "role_ids", "turn_ids")
    segments = arrays.get("segment_ids", arrays["attention_mask"])
    found = []
    for row, numbers in enumerate(segments):
        for number in range(1, numbers.max() + 1):
            columns = np.flatnonzero(numbers == number)
            own = (arrays[n][row, columns].tolist() for n in names)
            found.append([*zip(*own, strict=True)])
    return found, arrays


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("limits", [LIMITS, Limits(8, 12, 12), Limits(4, 24, 20)])
def test_rows_by_definition(packed, limits, monkeypatch):
    monkeypatch.setattr(chunks, "WINDOW", 7)  # documents handled together
    conversations = draw_conversations(0)
    store = make_store(conversations)
    plan = make_plan(store, "turns", L, 0, packed=packed, limits=limits)
    found, arrays = gathered_rows(plan)
    wanted = expected_rows(store, conversations, L, limits)
    assert len(wanted) > 40
    if packed:
        assert plan.n < len(found)
        assert Counter(map(tuple, found)) == Counter(map(tuple, wanted))
        answers = (arrays["token_type_ids"] == ANSWER) & (arrays["input_ids"] != 2)
        assert answers.sum(axis=1).max() <= limits.predictions
    else:
        assert found == wanted
    assert plan.skipped["conversations of a single turn"] == sum(
        len(turns) == 1 for turns in conversations
    )


def test_what_is_left_out_is_counted():
    turns = [(1, 5), (2, 5), (1, 5), (2, 30), (1, 2)]
    store = make_store([turns, [(1, 3)]])
    plan = make_plan(store, "turns", L, 0, limits=LIMITS)
    # Answers 1, 2 and 3; the context of answer 4 is a turn that does not fit.
    assert plan.n == 3 and plan.skipped == {
        "conversations of a single turn": 1,
        "tokens of knowledge": 0,
        "turns whose context does not fit": 1,
        "oldest turns of contexts": 1,  # 16 of 18 slots are free after cls
        "tokens of answers": 30 + 1 - 8,
    }
    row = plan.gather(np.array([2]), np.zeros(1, np.uint64), SPECIALS)
    last = row["input_ids"][0][row["token_type_ids"][0] == ANSWER]
    assert len(last) == 8 and last[-1] != SPECIALS.sep_id


def test_the_oldest_turn_leaves_the_others_as_they_are():
    """Roles and turns of the remaining turns do not depend on what is left out."""
    turns = draw_conversations(3, number=1, most=10, speakers=5, known=False)[0]
    turns += [(1, 3), (5, 2), (2, 4)]
    long, short = (
        make_plan(make_store([own]), "turns", 64, 0, limits=Limits(8, 64, 12))
        for own in (turns, turns[1:])
    )
    (*_, whole), _ = gathered_rows(long)
    (*_, rest), _ = gathered_rows(short)
    assert [x[1:] for x in whole[-len(rest) + 1 :]] == [x[1:] for x in rest[1:]]


@given(st.integers(2, 8), st.data())
def test_roles_rotate(speakers, data):
    """With 2 to 8 speakers: 0 answers, the others are ranked by their last turn."""
    spoke = data.draw(st.lists(st.integers(1, speakers), min_size=1, max_size=20))
    latest = [*dict.fromkeys(reversed(spoke))]
    found = find_roles(np.zeros(len(spoke), int), np.array(spoke)).tolist()
    assert found == [latest.index(one) for one in spoke]


def test_roles_of_two_who_take_turns_are_those_of_plato():
    for n in range(1, 9):
        spoke = np.arange(n) % 2 + 1
        wanted = [(n - 1 - i) % 2 for i in range(n)]
        assert find_roles(np.zeros(n, int), spoke).tolist() == wanted
    # Two conversations at once; knowledge has role 0.
    of, who = np.array([0, 0, 0, 1, 1, 1, 1]), np.array([0, 1, 2, 0, 7, 8, 7])
    assert find_roles(of, who).tolist() == [0, 1, 0, 0, 0, 1, 0]


def test_fill():
    """Conversations of all lengths fill packed rows."""
    store = make_store(draw_conversations(5, number=400, most=30, known=False))
    limits = Limits(16, 128, 48)
    plan = make_plan(store, "turns", 128, 0, packed=True, limits=limits)
    _, arrays = gathered_rows(plan)
    assert arrays["attention_mask"].mean() >= 0.95


def test_what_makes_no_rows():
    for turns, said in (
        ([[(1, 3)], [(2, 4)]], "every conversation has a single turn"),
        ([[(1, 3)], [(1, L), (2, 4)]], "no turn of a conversation has one before it"),
    ):
        with pytest.raises(UserError, match=said):
            make_plan(make_store(turns), "turns", L, 0, limits=LIMITS)
    store = make_store([[(1, 3)], [(2, 4)]])
    with pytest.raises(UserError, match=r"data\.plan=turns: rows of turns go with"):
        make_plan(store, "turns", L, 0)
    del store.streams["speaker"]
    with pytest.raises(UserError, match="no stream `speaker`"):
        make_plan(store, "turns", L, 0, limits=LIMITS)
