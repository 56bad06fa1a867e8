# SPDX-License-Identifier: Apache-2.0
"""Questions from a file to rows, and from logits to scores and answers."""

import json
from dataclasses import replace

import numpy as np
import pytest

from bertjax import UserError
from bertjax.assembly import command_line
from bertjax.data.corpus import tfds_source
from bertjax.data.tokenizers.tokenizer import load_tokenizer
from bertjax.tasks.prepare_task import make_form as made_form
from bertjax.tasks.task_rows import Form, Limits
from bertjax.tasks.types.span import (
    TASK_TYPE,
    make_question_rows,
    parse_text,
    read_questions,
)

CONTEXT = "The interpreter reads a file. A module is a file with statements."
FORM = Form(("question", "context"), "answers", (), 1, ("exact", "f1", "cmrc_f1"))


def squad(*asked):
    """Return SQuAD's JSON with questions (id, answer or None) about CONTEXT."""
    qas = [
        {
            "id": name,
            "question": "What is a module?",
            "answers": [{"text": a, "answer_start": CONTEXT.find(a)}] if a else [],
        }
        for name, a in asked
    ]
    paragraph = {"context": CONTEXT, "qas": qas}
    return json.dumps({"data": [{"paragraphs": [paragraph]}]})


@pytest.fixture(scope="module")
def tokenizer(vocabulary):
    return load_tokenizer(vocabulary)


def gold_logits(rows, length):
    """Make logits for the labels; without an answer, for the row's first token."""
    starts, ends = np.full((2, rows.n, length), -10.0, np.float32)
    each = np.arange(rows.n)
    starts[each, rows.windows.start_positions] = 10
    ends[each, rows.windows.end_positions] = 10
    return {"start_logits": [*starts], "end_logits": [*ends]}


@pytest.mark.parametrize("length", [76, 96])
def test_what_the_labels_say_is_right(tokenizer, length):
    read = parse_text(squad(("a", "a file with statements"), ("b", "reads")), "f")
    rows = make_question_rows(read, FORM, tokenizer, True).plan(length)
    said = gold_logits(rows, length)
    assert rows.score(said, np.arange(rows.n)) == {"exact": 1, "f1": 1, "cmrc_f1": 1}
    assert rows.scores == ("exact", "f1", "cmrc_f1")
    told = [*rows.answers(said, read)]
    assert [(t["id"], t["answer"]) for t in told] == [
        ("a", "a file with statements"),
        ("b", "reads"),
    ]
    assert all(t["score"] > t["null_score"] for t in told)


def test_questions_without_answers(tokenizer):
    read = parse_text(squad(("a", "reads"), ("b", None)), "f")
    rows = make_question_rows(read, FORM, tokenizer, True).plan(96)
    scores = rows.score(gold_logits(rows, 96), np.arange(rows.n))
    assert scores["exact"] == scores["best_f1"] == 1
    assert scores["threshold"] < 20
    assert [*scores] == [*rows.scores, "threshold"]
    batch = rows.gather(np.arange(rows.n), None, tokenizer)
    where = rows.windows.question == 1
    assert (batch["start_positions"][where] == 0).all()


def test_a_question_counts_when_all_its_rows_are_there(tokenizer):
    """An evaluation may use only a part of the rows."""
    read = parse_text(squad(("a", "reads"), ("b", "reads")), "f")
    rows = make_question_rows(read, FORM, tokenizer, True).plan(96)
    said = gold_logits(rows, 96)
    mine = np.flatnonzero(rows.windows.question == 1)
    some = {name: [logits[i] for i in mine] for name, logits in said.items()}
    assert [*rows.best_answers(some, mine)] == ["b"]


def test_lines_of_questions():
    lines = '{"question": "Who?", "context": "Ann."}\n'
    (found,) = parse_text(
        lines + '{"question": "Why?", "context": "b", "id": "x"}', "-"
    )
    assert [(q.id, q.text) for q in found.questions] == [("0", "Who?"), ("x", "Why?")]
    assert found.contexts == ["Ann.", "b"]
    (found,) = parse_text(2 * lines.replace("}", ', "id": null}'), "-")
    assert [q.id for q in found.questions] == ["0", "1"]
    with pytest.raises(UserError, match="-:1: question and context"):
        parse_text('{"question": 3, "context": "Ann."}', "-")
    with pytest.raises(UserError, match=r"-:1: .* no context .*\(--index=DIR\)"):
        parse_text('{"question": "Who?"}', "-")
    with pytest.raises(UserError, match="-:1: question and context"):
        parse_text(2 * '{"context": "Ann."}\n', "-")
    (found,) = parse_text(f"[\n {lines},\n {lines}]", "a.json")
    assert [q.text for q in found.questions] == ["Who?", "Who?"]


def test_files_and_what_is_said_of_them(tokenizer, tmp_path):
    text = squad(("a", "reads"), ("b", "reads"))
    (tmp_path / "moved.json").write_text(text.replace('_start": 16', '_start": 17', 1))
    (tmp_path / "again.json").write_text(squad(("a", "reads")))
    said = []
    read = read_questions(f"{tmp_path}/moved.json", "data.train", {}, said.append)
    assert "1 answer elsewhere" in said[0] and "moved.json" in said[0]
    more = read_questions(f"{tmp_path}/again.json", "data.train", {}, said.append)
    with pytest.raises(UserError, match=r"again.json: the id 'a' occurs twice"):
        make_question_rows([*read, *more], FORM, tokenizer, True)
    with pytest.raises(UserError, match="f: no question's answer is in its context"):
        make_question_rows(parse_text(squad(("a", None)), "f"), FORM, tokenizer, True)
    assert TASK_TYPE.make_rows is make_question_rows


def test_empty_questions_are_kept_and_said(tokenizer):
    text = squad(("a", "reads"), ("b", "a file"))
    said, read = [], parse_text(text.replace("What is a module?", " ", 1), "f.json")
    assert make_question_rows(read, FORM, tokenizer, True, said.append).plan(96).n == 2
    assert said == ["f.json: 1 empty question, kept: a"]


def test_squad_of_tfds(monkeypatch):
    def row(name, context, texts, starts):
        told = {"text": np.array([t.encode() for t in texts], object)}
        told["answer_start"] = np.array(starts, np.int32)
        plain = {"id": name.encode(), "question": b"What?", "answers": told}
        return plain | {"context": context.encode()}

    rows = [
        row("a", CONTEXT, ["reads"], [16]),
        row("b", CONTEXT, [], []),
        row("c", "é is one letter", ["é", "one"], [0, 5]),
    ]
    opened = []
    monkeypatch.setattr(
        tfds_source, "open_split", lambda *told: opened.append(told) or (None, "train")
    )
    monkeypatch.setattr(tfds_source, "read_split", lambda *told: iter(rows))
    name = "tfds:squad/v2.0:train"
    (found,) = read_questions(name, "data.train", {}, print)
    assert opened[0][0] == name and {*opened[0][1].values()} == {"data.train"}
    assert found.contexts == [CONTEXT, "é is one letter"]
    assert found.golds == {"a": ("reads",), "b": (), "c": ("é", "one")}
    assert [q.span for q in found.questions] == [(16, 21), None, (0, 1)]
    assert not found.moved + found.lost + found.unlabelled
    rows[0]["answers"] = {"text": ["reads"]}
    with pytest.raises(UserError, match=r"`answers` \(data.train\) has no text and"):
        read_questions(name, "data.train", {}, print)


def test_named_tasks_of_questions():
    made = command_line.parse(["--config=finetune/qa.py:task=squad2"]).config
    assert made.data.train == "tfds:squad/v2.0:train" and made.objective == "span"
    assert made_form(made).metrics == ("exact", "f1") and made.data.length == 384


def test_the_ids_of_lines_are_free_ones():
    lines = '{"question": "a?", "context": "b", "id": 1}\n' + (
        '{"question": "a?", "context": "b"}\n' * 2
    )
    assert [q.id for q in parse_text(lines, "-")[0].questions] == ["1", "0", "2"]


def test_questions_of_which_no_answer_is_said(tokenizer):
    """Such questions (of a test set) can be answered, but not trained on or scored."""
    whole = json.loads(squad(("a", "reads"), ("b", "a file")))
    del whole["data"][0]["paragraphs"][0]["qas"][1]["answers"]
    read = parse_text(json.dumps(whole), "f.json")
    with pytest.raises(
        UserError, match=r"f.json: .*qas\[1\]: 1 of 2 questions have no"
    ):
        make_question_rows(read, FORM, tokenizer, True)
    assert make_question_rows(read, FORM, tokenizer, False).plan(96).n == 2


def test_a_part_of_the_rows_has_the_same_scores(tokenizer):
    """It has the same scores even if all its questions have answers; they are NaN if no
    question is complete."""
    read = parse_text(squad(("a", "reads"), ("b", None), ("c", "reads")), "f")
    rows = make_question_rows(read, FORM, tokenizer, True).plan(80)
    said = gold_logits(rows, 80)
    for wanted, score in ([0, 2], 1), ([1], 1), ([], None):
        mine = np.flatnonzero(np.isin(rows.windows.question, wanted))
        some = {name: [logits[i] for i in mine] for name, logits in said.items()}
        found = rows.score(some, mine)
        assert {*rows.scores} <= {*found}
        assert found["best_f1"] == score if wanted else np.isnan(found["best_f1"])


def test_limits(tokenizer):
    """Limits apply to the layout and to answers; the defaults do not change hashes."""
    read = parse_text(squad(("a", "a file with statements"), ("b", "reads")), "f")
    rows, few = (
        make_question_rows(read, FORM._replace(limits=limits), tokenizer, True)
        for limits in (Limits(), Limits(5, 3, 3))
    )
    assert "limits" not in rows.form.identity
    assert rows.content_hash != few.content_hash
    few, rows = few.plan(20), rows.plan(80)
    assert few.n > rows.n and {*few.windows.cut} == {"a", "b"}
    assert any("1 answer of more than 3 pieces" in line for line in few.notes())
    assert not any("answers" in line for line in rows.notes())
    said = [one["answer"] for one in few.answers(gold_logits(few, 20), read)]
    assert said[1] == "reads" and "a file with statements" not in said[0]


def test_a_layout_is_made_once(tokenizer):
    read = parse_text(squad(("a", "reads")), "f")
    rows = make_question_rows(read, FORM, tokenizer, True)
    assert rows.plan(96).windows is rows.plan(96).windows
    assert rows.plan(96).windows is not rows.plan(76).windows


def test_predictions_say_nothing_where_the_doubt_is_great(tokenizer):
    read = parse_text(squad(("a", "reads"), ("b", None)), "f")
    rows = make_question_rows(read, FORM, tokenizer, True).plan(96)
    said = gold_logits(rows, 96)

    def answers(threshold):
        told = replace(rows, threshold=threshold).answers(said, read)
        return [one["answer"] for one in told]

    assert rows.facts["threshold"] == 0
    assert answers(0.0) == ["reads", ""]
    assert answers(-100.0) == ["", ""]
    assert answers(None)[0] == "reads" and answers(None)[1]
