# SPDX-License-Identifier: Apache-2.0
"""Rows of reading: spans of answers, layout, scores of the best passages, indexes."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from bertjax import UserError
from bertjax.assembly import batches, command_line
from bertjax.data.batches import Batches
from bertjax.data.features.base import Features, Settings
from bertjax.data.mixture import make_mixture
from bertjax.tasks import passage_index, tables
from bertjax.tasks.open_questions import (
    find_answers,
    parse_found,
    parse_questions,
    read_found,
)
from bertjax.tasks.passage_index import Passage, PassageIndex
from bertjax.tasks.task_rows import Asking, Form, Limits
from bertjax.tasks.types import read

SPECIALS = SimpleNamespace(cls_id=1, sep_id=2, pad_id=0, vocab_size=50)
FORM = Form(
    ("question", "ctxs"),
    "answers",
    (),
    1,
    ("exact", "f1", "exact@1", "exact@5"),
    limits=Limits(question_length=4),
    passages=2,
    candidates=3,
)


class Words:
    """A tokenizer in which a word's id is 10 plus its length."""

    vocab_size = 50

    def encode_with_offsets(self, texts):
        found = []
        for text in texts:
            at, spans = 0, []
            for word in text.split():
                at = text.index(word, at)
                spans.append((at, at + len(word)))
                at += len(word)
            found.append(([10 + b - a for a, b in spans], spans))
        return found

    def encode_batch(self, texts):
        return [ids for ids, _ in self.encode_with_offsets(texts)]


PARIS = {"id": "p", "title": "Paris", "text": "the capital of France", "score": 2.0}
ROME = {"id": "r", "title": "", "text": "Rome , rome and Romeo", "score": "1.5"}
ASKED = [
    {"id": "a", "question": "what is it ?", "answers": ["rome"], "ctxs": [PARIS, ROME]},
    {"id": "b", "question": "where", "answers": ["Paris"], "ctxs": [PARIS]},
]


def make(rows=ASKED, form=FORM, labelled=True):
    text = "\n".join(map(json.dumps, rows))
    found = [*tables.parse_rows(text, "json", "t.jsonl", form.keys(labelled))]
    return read.make_rows(found, form, Words(), labelled)


def test_layout_and_places():
    rows = make().plan(12)
    # Four pieces of the question, three special tokens, five pieces of the longest
    # passage.
    assert rows.n == 2 and rows.length == 12 and rows.lengths().tolist() == [12, 9]
    batch = rows.gather(np.array([0, 1]), None, SPECIALS)
    assert batch["input_ids"][0].tolist() == [
        [1, 14, 12, 12, 11, 2, 0, 0, 0, 0, 0, 0],
        [1, 14, 12, 12, 11, 2, 15, 13, 17, 12, 16, 2],
        [1, 14, 12, 12, 11, 2, 14, 11, 14, 13, 15, 2],
    ]
    assert batch["passage_begins"].tolist() == [[6, 6], [3, 0]]
    assert batch["passage_ends"].tolist() == [[11, 11], [8, 0]]
    assert batch["passage_weights"].tolist() == [[1, 1], [1, 0]]
    assert batch["passage_scores"].tolist() == [[2, 1.5], [2, 0]]
    # In any case, but only whole words: not in Romeo.
    assert batch["span_starts"][0, :, :3].tolist() == [[-1] * 3, [6, 8, -1]]
    assert batch["span_starts"][1, :, 0].tolist() == [3, -1]
    assert not batch["attention_mask"][1, 2].any()
    counts = rows.label_counts()["questions"]
    assert counts == {"answer in a passage": 2, "in the first": 1, "in none": 0} or (
        counts == {"answer in a passage": 2, "in the first": 1}
    )
    # An answer that is cut off does not count.
    short = rows.plan(9).gather(np.array([0, 1]), None, SPECIALS)
    assert short["span_starts"][0, 1, :3].tolist() == [6, -1, -1]


def test_answers_of_several_words():
    chars = np.array([[0, 3], [3, 4], [5, 9], [10, 13]])
    found = find_answers("New- York New", ["new- york", "York"], chars)
    assert found == [(0, 2), (2, 2)]
    assert find_answers("New- York New", ["Yor", "ew"], chars) == []


@pytest.mark.parametrize(
    "text, answers, found",
    [
        ("首都是巴黎。", ["巴黎"], [(3, 4)]),
        ("パリのSeine川", ["パリ", "seine"], [(0, 1), (3, 7)]),
        ("Seineparis川", ["Seine"], []),
        ("a\\ b 巴\u3000黎", ["a\\  b", "巴 黎"], [(0, 3), (5, 7)]),
    ],
)
def test_answers_in_scripts_without_spaces(text, answers, found):
    chars = np.array([[i, i + 1] for i in range(len(text))])
    assert find_answers(text, answers, chars) == found


def outputs_of(rows, best, priors):
    """Make outputs with the given best span (first, last) of each passage."""
    k = len(best[0])
    logits = np.full((2, len(best), k, rows.length), -20.0)
    for i, passages in enumerate(best):
        for slot, span in enumerate(passages):
            if span:
                logits[0, i, slot, span[0]] = logits[1, i, slot, span[1]] = -1.0
    names = {"start_logits": logits[0], "end_logits": logits[1]}
    return names | {"passage_scores": np.array(priors)}


def test_scores_and_answers():
    rows = make().for_scores().plan(12)
    assert rows.choices == 3  # no more passages than a question has
    # The right answer is in the second passage, which has a lower score.
    said = outputs_of(rows, [[(6, 6), (8, 8)], [(3, 3), None]], [[-0.2, -1.7], [0, -9]])
    said["start_logits"][0, 0, 6] = -3.0
    scores = rows.score(said, np.arange(2))
    assert scores == {"exact": 1, "f1": 1, "exact@1": 0.5, "exact@5": 1}
    asked = make(
        [{k: v for k, v in row.items() if k != "answers"} for row in ASKED],
        labelled=False,
    ).plan(12)
    one, two = asked.answers(said, ())
    assert (one["id"], one["answer"]) == ("a", "rome")
    assert one["score"] == pytest.approx(-3.7)
    assert [p["id"] for p in one["passages"]] == ["r", "p"]
    first = one["passages"][0]
    assert first["log_prob"] == -1.7 and first["score"] == 1.5
    assert first["text"] == ROME["text"] and two["answer"] == "Paris"
    assert "span_starts" not in asked.gather(np.arange(2), None, SPECIALS)


def test_a_passage_without_text_is_no_answer():
    bare = {"id": None, "question": "where", "ctxs": [{"text": ""}]}
    other = {"question": "where", "ctxs": [{"text": " "}, PARIS]}
    rows = make([bare, other], labelled=False).plan(12)
    said = outputs_of(rows, [[None, None], [None, (4, 4)]], [[0, -9], [0, -30]])
    one, two = rows.answers(said, ())
    assert (one["id"], one["answer"], one["score"]) == ("0", "", None)
    assert (two["answer"], two["score"]) == ("the", pytest.approx(-32))
    assert [p["answer"] for p in two["passages"]] == ["the", ""]


def test_a_mixture_has_rows_of_one_length():
    config = command_line.parse(["--config=finetune/read.py:smoke"]).config
    parts = {"short": make(ASKED[1:]), "long": make()}
    plans = batches.make_plans(config, batches.RowForm(12), parts)
    assert [rows.plan(12).length for rows in parts.values()] == [9, 12]
    shapes = {
        rows.gather(np.zeros(1, int), None, SPECIALS)["input_ids"].shape
        for rows in plans.values()
    }
    assert shapes == {(1, 3, 12)}
    # Batches report the shape of their rows, whatever data.length is.
    features = Features(Settings(config, None, None, length=128))
    mixed = make_mixture({name: rows.n for name, rows in plans.items()})
    made = Batches((*plans.values(),), mixed, features, SPECIALS, 4, 0)
    ids = made.batch(0)["input_ids"]
    assert (made.length, made.slots) == (ids.shape[-1], ids.size)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"answers": []}, "answers has to be a list of texts"),
        ({"ctxs": "x"}, "ctxs has to be a list of passages"),
        ({"ctxs": [{"title": "x"}]}, r"ctxs\[0\] has no text"),
        (
            {"ctxs": [{"text": "x", "score": "much"}]},
            r"ctxs\[0\]: title or score is wrong",
        ),
        ({"ctxs": []}, "no question has a passage"),
        ({"answers": ["Berlin"]}, "no passage of any question holds"),
    ],
)
def test_what_is_refused(change, words):
    with pytest.raises(UserError, match=f"t.jsonl:1: {words}"):
        make([ASKED[0] | change])


@pytest.fixture
def folder(tmp_path):
    """Write an index of PARIS and ROME."""
    path = tmp_path / "index"
    path.mkdir()
    passages = [Passage(p["id"], p["title"], p["text"]) for p in (PARIS, ROME)]
    passage_index.write_passages(path, passages)
    np.save(path / passage_index.VECTORS, np.float32([[1, 0], [0, 1]]))
    passage_index.seal(path, {"passages": 2, "width": 2})
    return path


def test_an_index(folder):
    index = PassageIndex(str(folder), "--index")
    (found,) = index.found(np.float32([[0.25, 1]]), 5)
    assert [(p["id"], p["score"]) for p in found] == [("r", 1.0), ("p", 0.25)]
    assert found[1]["title"] == "Paris"
    with pytest.raises(UserError, match="vectors of 2 numbers, the model of 3"):
        index.found(np.ones((1, 3), np.float32), 1)
    rows = make(form=FORM._replace(index=str(folder))).plan(12)
    batch = rows.gather(np.array([0, 1]), None, SPECIALS)
    vectors = [[[1, 0], [0, 1]], [[1, 0], [0, 0]]]
    assert batch["passage_vectors"].tolist() == vectors
    other = [ASKED[0] | {"ctxs": [PARIS | {"id": "q"}]}]
    with pytest.raises(UserError, match=r"the passage 'q' is not one of task\.index="):
        make(other, FORM._replace(index=str(folder)))
    # The rows' hash, which run.json stores, depends on the index.
    before = rows.content_hash
    assert before != make().plan(12).content_hash
    np.save(folder / passage_index.VECTORS, np.float32([[1, 0], [0, 2]]))
    with pytest.raises(UserError, match=r"vectors\.npy is not what was written"):
        PassageIndex(str(folder), "--index")
    passage_index.seal(folder, {})
    again = make(form=FORM._replace(index=str(folder))).plan(12)
    assert again.content_hash != before
    for facts in ({"format": 1, "sha256": "x"}, {"format": 1, "sha256": {}}, []):
        (folder / passage_index.FACTS).write_text(json.dumps(facts))
        with pytest.raises(UserError, match=r"is not an index: bertjax\.embed"):
            PassageIndex(str(folder), "--index")
    (folder / passage_index.FACTS).unlink()
    with pytest.raises(UserError, match=r"is not an index: bertjax\.embed"):
        PassageIndex(str(folder), "--index")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"width": 2}, "width=2, and those of questions have width=32"),
        ({"how": {"pooling": "cls"}}, "pooling=cls, .* give task.pooling=cls, or"),
        ({"how": {"dot": True}}, "normalize=False, .* give task.normalize=False, or"),
    ],
)
def test_an_index_that_does_not_fit_the_model(folder, facts, words):
    fits = {"width": 32, "how": {"pooling": "mean", "normalize": False, "dot": False}}
    given = ["--config=finetune/read.py:smoke", "--config.model.hidden_size=32"]
    config = command_line.parse(given).config
    passage_index.seal(folder, fits)
    config.task.index = str(folder)
    read.TASK_TYPE.check(config)
    passage_index.seal(folder, fits | facts)
    with pytest.raises(UserError, match=rf"task\.index=\S+ has vectors of {words}"):
        read.TASK_TYPE.check(config)


def test_rows_without_labels_have_as_many_passages_as_scored_ones():
    form = FORM._replace(passages=1, candidates=2)
    made = make(form=form)
    assert (made.taken, made.for_scores().taken) == (1, 2)
    assert make(form=form, labelled=False).taken == 2


def test_passages_of_files(tmp_path):
    (tmp_path / "a.txt").write_text("one two three\nfour\n\nfive\n")
    found = passage_index.read_passages(str(tmp_path), "--text", 3, print)
    assert [(p.id, p.title, p.text) for p in found] == [
        ("a:0", "a", "one two three"),
        ("a:1", "a", "four"),
        ("a:2", "a", "five"),
    ]
    (zh := tmp_path / "zh.text").write_text("巴黎是首都。\n人口 9 m\n\n")
    found = passage_index.read_passages(str(zh), "--text", 3, print)
    assert [p.text for p in found] == ["巴黎是", "首都。 人", "口 9 m"]
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("word")
    for value in (str(tmp_path), f"{tmp_path}/a.txt,{tmp_path}/x,{tmp_path}/y"):
        found = passage_index.read_passages(value, "--text", 3, print)
        assert {p.id for p in found} == {"a:0", "a:1", "a:2", "x/a:0", "y/a:0"}
        assert {p.title for p in found} == {"a"}
    (tmp_path / "corpus.jsonl.old").write_text("of no use")
    (tmp_path / "corpus.jsonl").write_text(
        '{"_id": 3, "title": "T", "text": "x\\ny"}\n'
    )
    with pytest.raises(UserError, match=r"--words=3 has no effect: .* has rows, each"):
        passage_index.read_passages(str(tmp_path), "--text", 3, print)
    (row,) = passage_index.read_passages(str(tmp_path), "--text", None, print)
    assert row == ("3", "T", "x\ny") and row.whole == "T x y"
    (table := tmp_path / "wiki.tsv").write_text("id\ttext\ttitle\n7\tx y\tT\n")
    found = passage_index.read_passages(str(table), "--text", None, print)
    assert found == [("7", "T", "x y")]
    (tmp_path / "corpus.jsonl").write_text('{"_id": 3, "text": "x"}\n' * 2)
    with pytest.raises(UserError, match="the id '3' occurs twice"):
        passage_index.read_passages(str(tmp_path), "--text", None, print)


def test_passages_without_an_id_have_one_that_no_other_file_has(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"id": 1, "text": "y"}\n')
    (tmp_path / "b.jsonl").write_text('{"_id": "0", "text": "z"}\n{"text": "w"}\n')
    files = f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
    found = passage_index.read_passages(files, "--text", None, print)
    assert [p.id + p.text for p in found] == ["2x", "1y", "0z", "3w"]


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("where is it ?\n", "question"),
        (json.dumps({"id": 1, "question": "where"}), "id, question"),
    ],
)
def test_questions_without_passages(text, known):
    """A reader without an index refuses such questions."""
    columns = FORM.keys(labelled=False, flags=True)
    with pytest.raises(UserError) as e:
        parse_found(text, "q.txt", columns)
    assert str(e.value) == (
        "q.txt:1: --columns: TEXT_PAIR='ctxs': the question has no passages; known: "
        f"{known}; bertjax.predict --index=DIR finds some"
    )
    with_passages = json.dumps(ASKED[1])
    assert [r.cells for r in parse_found(with_passages, "a", columns)] == ASKED[1:]


def test_questions_that_have_no_answer(tmp_path):
    """SQuAD 2.0 has such questions; predict --index writes them with an empty list."""
    rows, said = [{**ASKED[0], "answers": []}, *ASKED], []
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (file := tmp_path / "t.jsonl").write_text(text)
    found = read_found(str(file), "data.train", FORM.keys(), said.append)
    assert [row.cells for row in found] == ASKED
    assert said == [f"1 question without an answer, left out: {file}:1"]
    assert len(parse_found(text, "t", FORM.keys(flags=True))) == 2
    asked = read_found(str(file), "--input", FORM.keys(labelled=False, flags=True))
    assert len(asked) == 3
    with pytest.raises(UserError, match=r"t:1: no question has an answer \(answers"):
        parse_found(json.dumps(rows[0]), "t", FORM.keys())
    # objective=rag calls the column of the answers task.target.
    targets = FORM._replace(asking=Asking(label="task.target")).keys()
    assert len(read_found(str(file), "data.train", targets)) == 2


def test_questions():
    assert parse_questions("who?\n\nwhy?\n", "q") == [
        {"question": "who?"},
        {"question": "why?"},
    ]
    kept = parse_questions('{"question": "who?", "answers": ["I"], "x": 1}\n', "q")
    assert kept == [{"question": "who?", "answers": ["I"], "x": 1}]
    with pytest.raises(UserError, match=r"q\.jsonl:1: is not a JSON object"):
        parse_questions("[1, 2]\n", "q.jsonl")
    # The files of DPR and FiD are single lists.
    listed = json.dumps(ASKED, indent=1)
    assert parse_questions(listed, "-") == ASKED == parse_questions(listed, "q.json")
    columns = FORM.keys()
    assert [row.cells for row in parse_found(listed, "q", columns)] == ASKED
    with pytest.raises(UserError, match=r"q\.json:\[1\]: is not a JSON object"):
        parse_questions('[{"question": "a"},\n\n3]', "q.json", print)
    answers = [{"text": "b", "answer_start": 2}] * 2
    squad = {"qas": [{"id": "1", "question": "what?", "answers": answers}]}
    squad = {"data": [{"paragraphs": [squad | {"context": "a b"}]}]}
    (row,) = parse_questions(json.dumps(squad, indent=1), "q")
    assert row == {"id": "1", "question": "what?", "answers": ["b"]}
    (row,) = parse_questions(json.dumps(squad), "q")
    assert row["id"] == "1"
    # A table is not read as one question per line, which would include the answers.
    table = "question\tanswers\nwho?\tI\n"
    assert parse_questions(table, "q.tsv") == [{"question": "who?", "answers": "I"}]
    with pytest.raises(UserError, match=r"q\.csv: question='question' is unknown"):
        parse_questions("who?\nwhy?\n", "q.csv")
