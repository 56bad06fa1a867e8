# SPDX-License-Identifier: Apache-2.0
"""Rows of subgraphs: edges hidden with the masked one, and attention along edges."""

import numpy as np
import pytest
from subgraphs import gathered, make_rows, random_lines

from bertjax import UserError
from bertjax.tasks.types.edges import IN, NODE, OUT


def edges_of(batch, row, tokenizer):
    """Return the edges of a row, read from its attention; the masked one is first."""
    sees, types = batch["attention_edges"][row], batch["token_type_ids"][row]
    ids, real = batch["input_ids"][row], batch["attention_mask"][row] > 0
    np.testing.assert_array_equal(sees[real][:, real], sees[real][:, real].T)
    assert (np.diag(sees) == 1).all() and (sees[:, 0] == 1).all()
    np.testing.assert_array_equal(sees[0] > 0, real)
    found = []
    for out in np.flatnonzero(types == OUT):
        into = out + 1
        assert types[into] == IN and ids[out] == ids[into]
        ends = []
        for half, other in ((out, into), (into, out)):
            seen = {*np.flatnonzero(sees[half])} - {0, half, other}
            assert sees[half, other] and len(seen) == 1
            (end,) = seen
            assert types[end] == NODE
            ends.append(tokenizer.pieces[ids[end]])
        found.append((ends[0], tokenizer.pieces[ids[out]], ends[1]))
    nodes = real & (types == NODE)
    for a in np.flatnonzero(nodes)[1:]:
        assert not {*np.flatnonzero(sees[a] & nodes)} - {0, a}
    return found


@pytest.mark.parametrize("length", [16, 64, 256])
def test_nothing_joins_the_two_ends_but_the_mask(length):
    text = random_lines()
    rows, tokenizer = make_rows(text)
    rows = rows.plan(length)
    edges = {tuple(line.split("\t")) for line in text.splitlines()}
    batch = gathered(rows, tokenizer)
    hidden = []
    for row, line in enumerate(text.splitlines()):
        h, r, t = line.split("\t")
        masked, *context = edges_of(batch, row, tokenizer)
        assert masked == (h, "[MASK]", t)
        assert tokenizer.pieces[batch["edges_ids"][row, 0]] == r
        assert len({*context}) == len(context) <= (length - 5) // 3
        assert {*context} <= edges
        assert all({a, b} != {h, t} for a, _, b in context)  # inverses do not leak
        assert all({a, b} & {h, t} for a, _, b in context)
        others = {e for e in edges if {e[0], e[2]} == {h, t}} - {(h, r, t)}
        hidden.append(len(others))
        around = {e for e in edges if {e[0], e[2]} & {h, t}} - others - {(h, r, t)}
        assert len(context) == min(len(around), rows.room)
        assert rows.lengths()[row] == 5 + 3 * len(context)
    assert rows.hidden.tolist() == hidden and sum(hidden) > 0
    assert f"{sum(hidden)} are hidden with them" in next(rows.notes())
    assert (batch["attention_mask"].sum(1) <= rows.lengths()).all()


def test_contexts_are_drawn_anew_but_where_they_are_scored():
    rows, tokenizer = make_rows(random_lines())
    learnt = rows.plan(16)
    one, other = (gathered(learnt, tokenizer, epoch) for epoch in (0, 1))
    assert (one["input_ids"] != other["input_ids"]).any()
    scored = rows.for_scores().plan(16)
    one, other = (gathered(scored, tokenizer, epoch) for epoch in (0, 1))
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], name)


def test_a_question_has_one_context_wherever_it_stands():
    train, asked = random_lines(), random_lines(seed=1).splitlines(keepends=True)[:20]
    contexts = []
    for lines in (asked, asked[::-1]):
        rows, tokenizer = make_rows(train, "".join(lines))
        batch = gathered(rows.for_scores().plan(16), tokenizer)
        edges = [edges_of(batch, row, tokenizer) for row in range(len(lines))]
        contexts.append(dict(zip(lines, edges, strict=True)))
    assert contexts[0] == contexts[1]


def test_held_out_edges_are_in_no_context():
    train = "a\tr\tb\nb\tr\tc\n"
    rows, tokenizer = make_rows(train, "a\tr\tc\nb\tr\ta\n")
    batch = gathered(rows.for_scores().plan(32), tokenizer)
    assert edges_of(batch, 0, tokenizer)[1:] == [("a", "r", "b"), ("b", "r", "c")]
    assert edges_of(batch, 1, tokenizer)[1:] == [("b", "r", "c")]
    assert rows.hidden.tolist() == [0, 1]


def test_a_loop_has_one_end():
    rows, tokenizer = make_rows("a\tr\ta\na\tr\tb\n")
    assert edges_of(gathered(rows.plan(16), tokenizer), 0, tokenizer) == [
        ("a", "[MASK]", "a"),
        ("a", "r", "b"),
    ]


def test_what_is_no_question_of_a_relation_is_refused():
    for line in ("a\tr\t?", "a\tr\tb", "?\t?\tb"):
        with pytest.raises(UserError, match=r"q.tsv:1: write \? in place of the rel"):
            make_rows("a\tr\tb\n", line, labelled=False)
    rows, _ = make_rows("a\tr\tb\n", "b\t?\ta", labelled=False)
    with pytest.raises(UserError, match="256 tokens at most"):
        rows.plan(300)
