# SPDX-License-Identifier: Apache-2.0
"""Rows whose passages a step finds equal rows with the passages in the file."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_encoder
from test_seq2seq_rows import SPECIALS, Letters

from bertjax import UserError
from bertjax.data.batches import Batches
from bertjax.data.features.base import Features, Settings, count_slots, count_text
from bertjax.data.mixture import make_mixture
from bertjax.objectives import find_passages
from bertjax.objectives.find_passages import Finder
from bertjax.tasks import passage_index, tables
from bertjax.tasks.marginal_rows import MarginalRows
from bertjax.tasks.passage_index import Passage
from bertjax.tasks.task_rows import Form, Limits, Targets
from bertjax.tasks.types.rag import make_rows

PASSAGES = [Passage(f"p{i}", "", text) for i, text in enumerate(["hij", "k", "lmnop"])]
ASKED = [("abc", ["x"]), ("d", ["yz", "w"]), ("ef", ["uvu"])]
FORMS = {
    "prefix": (Targets(3), 1, {}),
    "two separators": (Targets(3), 2, {}),
    "bart": (Targets(3, "decoder"), 1, {"num_decoder_layers": 1}),
    "t5": (Targets(3, "decoder", bare=True), 1, {"num_decoder_layers": 1}),
}


@pytest.fixture
def index(tmp_path):
    passage_index.write_passages(tmp_path, PASSAGES)
    np.save(tmp_path / "vectors.npy", np.eye(3, 4, dtype=np.float32))
    passage_index.seal(tmp_path, {"model": "m", "width": 4})
    return str(tmp_path)


def form_of(name, **more):
    targets, separators, _ = FORMS[name]
    limits, metrics = Limits(question_length=3), ("perplexity",)
    whole = dict(targets=targets, limits=limits, passages=3)
    columns = ("question",) if "index" in more else ("question", "ctxs")
    return Form(columns, "answers", (), separators, metrics, **whole, **more)


def rows_of(form, labelled=True, bare=(), say=print):
    ctxs = [{"id": p.id, "text": p.text, "score": 0.0} for p in PASSAGES]
    cells = [{"question": q, "answers": a, "ctxs": ctxs} for q, a in ASKED]
    for i in bare:
        cells[i]["ctxs"] = []
    read = [tables.Row(cell, f"t.jsonl:{i}") for i, cell in enumerate(cells)]
    return make_rows(read, form, Letters(), labelled, say)


def test_what_is_written_in_scripts_without_spaces(monkeypatch):
    """WordPiece decodes such text with spaces; right texts then once scored 0."""
    monkeypatch.setattr(MarginalRows, "texts_of", lambda *_: ["巴 黎", "yz", "巴 山"])
    cells = ("abc", ["巴黎"]), ("d", ["yz", "w"]), ("ef", ["巴黎"])
    monkeypatch.setitem(globals(), "ASKED", cells)
    form = form_of("prefix")._replace(metrics=("exact", "f1"))
    scores = rows_of(form).score({"nats": np.zeros(3)}, np.arange(3))
    assert scores == pytest.approx({"exact": 2 / 3, "f1": 2.5 / 3})


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_rows_are_those_with_given_passages(name, labelled, index, monkeypatch):
    """Questions with zero vectors find the passages in their order."""
    zeros = lambda params, cfg, batch, finder, rng: jnp.zeros((3, 4))  # noqa: E731
    monkeypatch.setattr(find_passages, "question_vectors", zeros)
    plain = rows_of(form_of(name), labelled).plan(24)
    example = np.arange(3)
    wanted = plain.gather(example, None, SPECIALS)
    rows = rows_of(form_of(name, index=index), labelled).plan(24)
    assert rows.n == 3 and (rows.lengths() <= 24).all()
    batch = rows.gather(example, None, SPECIALS)
    cfg = tiny_encoder(200, 24, **FORMS[name][2])
    finder = Finder(3, *rows.candidates, False, True)
    params = {"tables": {k: jnp.array(v) for k, v in rows.tables.items()}}
    found = jax.tree.map(
        np.asarray, find_passages.find(params, cfg, batch, finder, None)
    )
    assert found["passage_numbers"].tolist() == [[0, 1, 2]] * 3
    assert wanted.keys() - {"text_tokens"} <= found.keys()
    real = wanted["attention_mask"] > 0
    assert (found["attention_mask"].sum(2) == real.sum(2)).all()
    for key in ("input_ids", "attention_steps"):
        if key in wanted:
            own = found[key][found["attention_mask"] > 0]
            np.testing.assert_array_equal(own, wanted[key][real])
    for key in ("decoder_input_ids", "decoder_attention_mask", "lm_ids", "lm_weights"):
        if key in wanted:
            np.testing.assert_array_equal(found[key], wanted[key])
    if "lm_positions" in wanted:
        used = np.broadcast_to(wanted["lm_weights"][:, None] > 0, (3, 3, 4))
        own = found["lm_positions"][used]
        np.testing.assert_array_equal(own, wanted["lm_positions"][used])
    questions = batch["question_ids"][batch["question_mask"] > 0].tolist()
    assert questions == [1, 5, 6, 7, 2, 1, 8, 2, 1, 9, 10, 2]


@pytest.mark.parametrize("name", FORMS)
def test_rows_hold_no_more_text_than_they_have_slots(name, index):
    rows = rows_of(form_of(name, index=index)).plan(24)
    batch = rows.gather(np.arange(rows.n), None, SPECIALS)
    assert 0 < count_text(batch) <= count_slots(batch)


def test_a_question_without_passages_is_answered_and_not_learnt():
    said = []
    rows = rows_of(form_of("prefix"), True, [0, 2], said.append)
    assert said == ["2 questions without a passage, left out: t.jsonl:0, t.jsonl:2"]
    assert rows.n == 1 and rows.is_passage.all() and rows.plan(24).n == 1
    rows = rows_of(form_of("prefix"), False, [0, 2], said.append)
    assert rows.n == 3 and [*map(len, rows.answered)] == [0, 3, 0] and len(said) == 1
    with pytest.raises(UserError, match=r"^t\.jsonl:0: no question has a passage"):
        rows_of(form_of("prefix"), True, range(3))


def test_slots_are_those_of_all_passages():
    rows = rows_of(form_of("prefix")).plan(24)
    features = Features(Settings(None, None, None, length=24))
    specials = SimpleNamespace(**vars(SPECIALS), vocab_size=Letters.vocab_size)
    made = Batches((rows,), make_mixture({"x": rows.n}), features, specials, 2, 0)
    assert made.slots == made.batch(0)["input_ids"].size == 2 * 3 * 24


def test_passages_are_cut_to_what_a_row_has_room_for(index):
    rows = rows_of(form_of("prefix", index=index))
    wide, narrow = (rows.plan(n) for n in (24, 12))
    assert [r.candidates.length for r in (wide, narrow)] == [5, 2]
    assert narrow.tables["passages"].tolist() == [[12, 13], [15, -1], [16, 17]]
    cut = "2 of 3 passages are cut: data.length=12 less 5 for the question and 5 for"
    assert [*narrow.notes()][1].startswith(cut)
    with pytest.raises(UserError, match=r"data\.length=10 is too short: rows need 11"):
        rows.plan(10)
    # Rows without a target have as much room for one.
    asked = rows_of(form_of("prefix", index=index), labelled=False).plan(12)
    assert asked.candidates == narrow.candidates and (asked.lengths() == 8).all()


def test_sets_of_rows_share_the_passages(index):
    """Training and evaluation open and encode an index once."""
    read, form = [tables.Row({"question": "ab"}, "q:1")], form_of("t5", index=index)
    letters = Letters()
    one, two = (make_rows(read, form, letters, False) for _ in range(2))
    assert one.texts is two.texts and one.vectors is two.vectors
    assert make_rows(read, form, Letters(), False).texts is not one.texts


def test_more_passages_than_there_are(index):
    with pytest.raises(UserError, match=r"task\.passages=4 is more than \S+ has: 3"):
        rows_of(form_of("prefix", index=index)._replace(passages=4))


def test_rows_say_what_they_are_of(index, tmp_path):
    rows = rows_of(form_of("prefix", index=index))
    before = rows.content_hash
    lines = [*rows.plan(24).notes()]
    assert lines == [
        "3 questions, each with 3 of 3 passages of 5 tokens at most, found in each step"
    ]
    np.save(tmp_path / "vectors.npy", -np.eye(3, 4, dtype=np.float32))
    with pytest.raises(UserError, match=r"vectors\.npy is not what was written"):
        rows_of(form_of("prefix", index=index))
    passage_index.seal(tmp_path, {"model": "m", "width": 4})
    assert rows_of(form_of("prefix", index=index)).content_hash != before
