# SPDX-License-Identifier: Apache-2.0
"""CoKE's rows: queries, packing, paths, and independence of the batch."""

import numpy as np
import pytest

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.tasks.graphs import Graph
from bertjax.tasks.task_rows import Form
from bertjax.tasks.triple_files import parse_triples
from bertjax.tasks.types import complete
from bertjax.tasks.types.complete import FIRST, TASK_TYPE, make_tokenizer
from bertjax.tasks.walks import Walks, draw_lengths


def random_lines(entities=40, relations=3, n=150, seed=0):
    draw = np.random.default_rng(seed)
    rows = np.unique(draw.integers(0, [entities, relations, entities], (n, 3)), axis=0)
    return "".join(f"e{h}\tr{r}\te{t}\n" for h, r, t in rows)


def make_rows(text, labelled=True, paths=1, graph=None, answers=1):
    read = parse_triples(text, "t.tsv")
    settings = {"paths": paths, "answers": answers}
    made = Graph.of(read, [], {}, False)
    graph = graph or Graph(made.entities, made.relations, settings=settings)
    form = Form((), "", (), 1, TASK_TYPE.metrics, graph=graph)
    tokenizer = make_tokenizer(graph)
    return TASK_TYPE.make_rows(read, form, tokenizer, labelled), tokenizer


def all_rows(rows, tokenizer, keys=None):
    example = np.arange(rows.n)
    keys = counter_rng.fold(1, 0, example) if keys is None else keys
    return rows.gather(example, keys, tokenizer)


def asked(batch, tokenizer):
    """Return the queries of a batch, each as a sequence of pieces with its answer."""
    found = []
    for row, segments in enumerate(batch["segment_ids"]):
        for slot in range(segments.max()):
            mine = segments == slot + 1
            ids = batch["input_ids"][row, mine].copy()
            places = batch["position_ids"][row, mine]
            assert places.tolist() == [*range(len(ids))]
            at = batch["complete_positions"][row, slot]
            assert mine[at] and batch["input_ids"][row, at] == tokenizer.mask_id
            assert (ids == tokenizer.mask_id).sum() == 1
            end = "head" if places[np.flatnonzero(mine) == at][0] == 0 else "tail"
            other = ids[-1] if end == "head" else ids[0]
            assert batch["complete_given"][row, slot] == other
            ids[ids == tokenizer.mask_id] = batch["complete_ids"][row, slot]
            found.append((end, *(tokenizer.pieces[i] for i in ids)))
    assert len(found) == (batch["complete_weights"] > 0).sum()
    return found


@pytest.mark.parametrize("length", [3, 24, 96, 128])
def test_both_ends_of_each_triple_are_asked_once(length):
    text = random_lines()
    rows, tokenizer = make_rows(text)
    rows = rows.plan(length)
    found = asked(all_rows(rows, tokenizer), tokenizer)
    triples = [tuple(line.split("\t")) for line in text.splitlines()]
    wanted = [(end, *triple) for triple in triples for end in ("head", "tail")]
    assert sorted(found) == sorted(wanted)
    assert rows.slots == length // 3
    full = rows.lengths()[:-1]  # the last row need not be full
    assert (full / length >= 0.95).all() or length == 3


def test_a_row_is_itself_alone_and_in_any_batch():
    rows, tokenizer = make_rows(random_lines(), paths=3)
    rows = rows.plan(48)
    whole = all_rows(rows, tokenizer)
    for i in (0, rows.n - 1):
        example = np.array([i])
        alone = rows.gather(example, counter_rng.fold(1, 0, example), tokenizer)
        for name, values in alone.items():
            np.testing.assert_array_equal(values[0], whole[name][i], name)
    # The same file gives the same rows; another order of lines gives another graph.
    again = make_rows(random_lines(), paths=3)[0].plan(48)
    assert again.content_hash == rows.content_hash
    turned = "".join(random_lines().splitlines(keepends=True)[::-1])
    assert make_rows(turned, paths=3)[0].content_hash != rows.content_hash


@pytest.mark.parametrize("answers", [2, 3, 64])
def test_a_question_is_asked_once_for_so_many_answers(answers):
    """Every answer is trained on once per epoch; a query has its triples' weight."""
    text = random_lines(entities=12, relations=2, n=150)
    rows, tokenizer = make_rows(text, answers=answers)
    rows = rows.plan(24)
    right = {}
    for h, r, t in (line.split("\t") for line in text.splitlines()):
        right.setdefault(("tail", h, r), set()).add(t)
        right.setdefault(("head", t, r), set()).add(h)
    batch = all_rows(rows, tokenizer)
    found, weights = asked(batch, tokenizer), batch["complete_weights"]
    ids = [batch["complete_ids"][..., None], batch["complete_more"]]
    ids = np.concatenate(ids, axis=-1)[weights > 0]
    assert ids.shape[1] == answers
    learnt = {query: [] for query in right}
    shares = dict.fromkeys(right, 0)
    each = zip(found, ids, weights[weights > 0], strict=True)
    for (end, *triple), share, weight in each:
        query = end, triple[0] if end == "tail" else triple[2], triple[1]
        mine = [tokenizer.pieces[i] for i in share if i >= 0]
        assert weight == len(mine)
        learnt[query] += mine
        shares[query] += 1
    assert {query: sorted(mine) for query, mine in learnt.items()} == {
        query: sorted(known) for query, known in right.items()
    }
    assert shares == {q: -(-len(known) // answers) for q, known in right.items()}
    # Evaluations query each triple.
    assert len(rows.for_scores().plan(24).laid.sides) == 2 * text.count("\n")


def test_paths_have_their_own_answer_beside_several():
    text = random_lines(n=60)
    rows, tokenizer = make_rows(text, paths=3, answers=4)
    rows = rows.plan(64)
    batch = all_rows(rows, tokenizer)
    one, more = make_rows(text, paths=3)[0].plan(64), batch["complete_more"]
    real = batch["complete_weights"] > 0
    lengths = [len(x) - 3 for x in asked(batch, tokenizer)]
    assert (more[real][np.array(lengths) > 1] == -1).all()
    assert (more[real][np.array(lengths) == 1] >= 0).any()
    assert (one.edges > 1).sum() == (rows.edges > 1).sum()
    assert one.content_hash != rows.content_hash


def test_paths_are_walks_of_the_graph():
    text = random_lines(n=60)
    rows, tokenizer = make_rows(text, paths=3)
    rows = rows.plan(64)
    edges = {tuple(line.split("\t")) for line in text.splitlines()}
    lengths, drawn = set(), []
    for epoch in range(3):
        keys = counter_rng.fold(7, epoch, np.arange(rows.n))
        found = asked(all_rows(rows, tokenizer, keys), tokenizer)
        drawn.append(found)
        for _, head, *relations, tail in found:
            lengths.add(len(relations))
            reached = {head}
            for relation in relations:
                reached = {t for h, r, t in edges if h in reached and r == relation}
            assert tail in reached
    assert lengths == {1, 2, 3}
    # Triples are the same in every epoch; paths are drawn anew.
    first, *others = ([x for x in found if len(x) == 4] for found in drawn)
    assert all(sorted(other) == sorted(first) for other in others)
    assert drawn[0] != drawn[1]
    kept = rows.lengths()[:-1] / 64
    assert kept.min() >= 0.9 and kept.mean() >= 0.95


def test_paths_end_where_nothing_leads_on():
    # The edges are 0 -> 1 -> 2 -> 3.
    triples = np.array([[0, 0, 1], [1, 0, 2], [2, 0, 3]], np.int32)
    walks = Walks.of(triples, 4)
    assert walks.reach(np.arange(4)).tolist() == [2, 2, 1, 0]
    lengths = draw_lengths(walks, triples[:, 2], 3)
    assert lengths[0] in (2, 3) and lengths[1:].tolist() == [2, 1]
    keys = np.zeros(1, np.uint64)
    walked, ends = walks.walk(np.array([[1, 2]]), np.array([[2, 1]]), keys)
    assert ends.tolist() == [[3, 3]]
    assert walked.tolist() == [[[0, 0], [0, 0]]]
    rows, _ = make_rows("a\tr\tb\nb\tr\tc\n", paths=2)
    assert [*rows.plan(16).notes()] == [
        "1 triples begin no path: their tails lead nowhere"
    ]


def test_scored_rows_know_what_is_right_too():
    text = "a\tr\tb\na\tr\tc\nd\tr\tb\n"
    rows, tokenizer = make_rows(text)
    scored = rows.for_scores().plan(24)
    batch = all_rows(scored, tokenizer)
    found = asked(batch, tokenizer)
    pieces = tokenizer.pieces
    others = {
        query: {pieces[FIRST + i] for i in known if i >= 0}
        for query, known in zip(found, batch["known_entities"][0], strict=False)
    }
    assert others["tail", "a", "r", "b"] == {"c"}
    assert others["head", "a", "r", "b"] == {"d"}
    assert others["tail", "d", "r", "b"] == set()
    assert "known_entities" not in all_rows(rows.plan(24), tokenizer)


def test_rows_that_are_scored_have_fewer_queries_beside_hubs(monkeypatch):
    """Each has room for all that is known to answer one."""
    rows, tokenizer = make_rows("".join(f"a\tr\tb{i}\n" for i in range(9)))
    monkeypatch.setattr(complete, "MOST_KNOWN", 30)
    known = all_rows(rows.for_scores().plan(24), tokenizer)["known_entities"]
    assert known.shape == (6, 3, 9) and (known >= 0).sum() == 9 * 8
    monkeypatch.setattr(complete, "MOST_KNOWN", 1)
    assert len(rows.for_scores().plan(24).starts) - 1 == 18
    assert len(rows.plan(24).starts) - 1 == 3


def test_rows_that_are_answered_say_nothing_of_what_is_right():
    rows, tokenizer = make_rows("a\tr\tb\n")
    queries, _ = make_rows("a\tr\t?\n?\tr\tb\n", labelled=False, graph=rows.graph)
    batch = all_rows(queries.plan(12), tokenizer)
    assert batch.keys().isdisjoint({"complete_ids", "known_entities"})
    pieces = [tokenizer.pieces[i] for i in batch["input_ids"][0, :6]]
    assert pieces == ["a", "r", "[MASK]", "[MASK]", "r", "b"]


def test_one_name_for_several_things_is_told_apart():
    graph = Graph(["a", "[MASK]"], ["a", "r"])
    tokenizer = make_tokenizer(graph)
    assert tokenizer.pieces[FIRST:] == ["a", "[MASK]'", "a'", "r"]
    assert tokenizer.mask_id < FIRST


def test_rows_that_are_too_short_are_refused():
    rows, _ = make_rows("a\tr\tb\nb\tr\tc\n", paths=2)
    with pytest.raises(UserError, match="a sequence has 4 tokens"):
        rows.plan(3)
