# SPDX-License-Identifier: Apache-2.0
"""Rows of choices: from tables to batches, from logits to answers, and refusals."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from bertjax import UserError
from bertjax.data.corpus import tfds_source
from bertjax.tasks import tables
from bertjax.tasks.task_rows import Form
from bertjax.tasks.text_rows import make_texts
from bertjax.tasks.types import choose

SPECIALS = SimpleNamespace(cls_id=1, sep_id=2, pad_id=0)
LIST = Form(("text", "", "choices"), "label", (), 1, ("accuracy",))
COLUMNS = LIST._replace(columns=("text", "asked", "one", "two"))
RACE = Form(("article", "questions", "options"), "answers", (), 1, ("accuracy",))


class Letters:
    """A tokenizer in which the ids are those of letters."""

    vocab_size = 200

    def encode_batch(self, texts):
        return [[ord(ch) for ch in text] for text in texts]


def read(form, *rows, labelled=True):
    if isinstance(rows[0], dict):
        text, kind = "\n".join(map(json.dumps, rows)), "json"
    else:
        text, kind = "\n".join("\t".join(row) for row in rows), "tsv"
    return [*tables.parse_rows(text, kind, f"t.{kind}", form.keys(labelled))]


def made(form, *rows, labelled=True):
    found = read(form, *rows, labelled=labelled)
    return choose.make_choices(found, form, Letters(), labelled)


def row(text="c", found=("x", "yy"), label=0):
    return {"text": text, "choices": [*found], "label": label}


def test_layout():
    rows = made(LIST, row(label="B"), row("cc", ("z", "z", "zzz"), 2)).plan(6)
    assert rows.n == 2 and rows.choices == 3 and rows.labels.tolist() == [1, 2]
    assert rows.lengths().tolist() == [6, 6] and rows.truncated([0, 1]).tolist() == [
        0,
        2,
    ]
    batch = rows.gather(np.array([1, 0]), None, SPECIALS)
    c, x, y, z = map(ord, "cxyz")
    assert batch["input_ids"].tolist() == [
        [[1, c, c, 2, z, 2], [1, c, c, 2, z, 2], [1, c, c, 2, z, 2]],
        [[1, c, 2, x, 2, 0], [1, c, 2, y, y, 2], [0] * 6],
    ]
    assert batch["choice_weights"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["token_type_ids"][0, 2].tolist() == [0, 0, 0, 0, 1, 1]
    assert batch["attention_mask"][1].sum(-1).tolist() == [5, 6, 0]
    assert batch["labels"].tolist() == [2, 1]
    # With room for more choices, rows are the same with more padding.
    wide = dataclasses.replace(rows, choices=4)
    wide = wide.gather(np.array([1, 0]), None, SPECIALS)
    assert (wide["input_ids"][:, :3] == batch["input_ids"]).all()
    assert not wide["input_ids"][:, 3].any() and not wide["choice_weights"][:, 3].any()


def test_a_column_a_choice_is_laid_out_as_pairs():
    head, body = [*COLUMNS.keys().values()], ("cccccc", "why", "xxx", "y", "two")
    found = made(COLUMNS, head, body)
    pairs = tables.parse_rows("a\tb\ncccccc\twhy xxx\ncccccc\twhy y", "tsv", "p", {})
    form = Form(("a", "b"), "", (), 1, ())
    texts = make_texts([*pairs], form, Letters(), False)
    for length in (7, 12, 20):
        batch = found.plan(length).gather(np.array([0]), None, SPECIALS)
        plain = texts.plan(length).gather(np.arange(2), None, SPECIALS)
        for name in ("input_ids", "attention_mask", "token_type_ids"):
            assert (batch[name][0] == plain[name]).all()
    assert found.labels.tolist() == [1]  # the column's name
    assert found.content_hash != made(COLUMNS, head, (*body[:-1], "one")).content_hash


def test_articles_with_questions():
    article = {
        "article": "c",
        "questions": ["p", "q _ r"],
        "options": [["x", "y"], ["x", "y", "z"]],
        "answers": ["A", "c"],
    }
    rows = made(RACE, article)
    assert rows.n == 2 and rows.labels.tolist() == [0, 2]
    assert rows.context.tolist() == [0, 0] and len(rows.texts[0].lengths) == 1
    assert bytes(rows.texts[1][4]).replace(b"\0", b"") == b"q _ r z"
    scores = {"scores": np.float32([[1, 0, -1e9], [0, 0, 5]])}
    assert rows.score(scores, np.arange(2)) == {"accuracy": 1.0}
    assert rows.score({"scores": scores["scores"][:1]}, np.array([1])) == {
        "accuracy": 0
    }
    del article["answers"]  # as in the input of predict
    told = [*rows.answers(scores, read(RACE, article, labelled=False))]
    assert [(t["label"], t["choice"]) for t in told] == [(0, "x"), (2, "z")]
    assert len(told[0]["scores"]) == 2 and sum(told[0]["scores"]) == pytest.approx(1)
    assert told[1]["score"] == max(told[1]["scores"])
    with pytest.raises(UserError, match=r"t\.json:1: options has to be a list of 2"):
        made(RACE, article | {"options": [["x", "y"]]}, labelled=False)


def test_articles_without_questions_are_said():
    one = {"article": "c", "questions": ["p"], "options": [["x", "y"]]}
    bare, said = {"article": "d", "questions": [], "options": []}, []
    found = read(RACE, one, bare, labelled=False)
    made = choose.make_choices(found, RACE, Letters(), False, said.append)
    assert made.n == 1 and said == ["1 row without questions, left out: t.json:2"]
    with pytest.raises(UserError, match=r"t\.json:2: the list of questions is empty"):
        choose.make_choices(found[1:], RACE, Letters(), False)


@pytest.mark.parametrize(
    ("form", "bad", "said"),
    [
        (LIST, row(label=2), "label '2' is none of the 2 choices: 0 to 1, A to B"),
        (LIST, row(label="C"), "label 'C' is none of the 2 choices"),
        (LIST, row(label=-1), "label '-1' is none of the 2 choices"),
        (LIST, row(label=""), "the label is empty"),
        (LIST, row(label="ß"), "label 'ß' is none of the 2 choices"),
        (LIST, row(found=("x", " ")), "choice 2 is empty"),
        (LIST, row(found=("x", 3)), "choice 2 is not text: 3"),
        (LIST, row(found=("x",)), "there are less than two choices"),
        (LIST, row() | {"choices": "x"}, "the choices holds no list of choices"),
        (LIST, row(text=3), "the text has to be a text, and is 3"),
        (LIST._replace(labels=("1", "2")), row(label=0), "label '0' is none"),
        (LIST._replace(labels=("1", "2")), row(found="xyz"), "task.labels names 2"),
    ],
)
def test_what_is_refused(form, bad, said):
    good = row(label="1")
    with pytest.raises(UserError) as e:
        made(form, good, bad)
    assert said in str(e.value) and str(e.value).startswith("t.json:2: ")


def test_unequal_columns_and_columns_that_are_not_there():
    head = [*COLUMNS.keys().values()]
    with pytest.raises(UserError, match=r"t\.tsv:2: the row has 4 cells, the first on"):
        read(COLUMNS, head, ("c", "q", "x", "y"))
    with pytest.raises(UserError, match=r"t\.tsv: task\.choices\[1\]='two'"):
        read(COLUMNS, [*head[:-2], "tow", "label"])


def test_a_number_is_no_name_of_a_column():
    form = Form(("1", "", "2", "3", "4"), "5", (), 1, ("accuracy",))
    rows = read(form, ("c", "x", "y", "z", "2"), ("d", "x", "y", "z", "0"))
    assert [choose.label_of(r, form, 3) for r in rows] == [2, 0]


def test_lists_of_tfds(monkeypatch):
    features = dict.fromkeys(("article", "options"), SimpleNamespace())
    builder = SimpleNamespace(info=SimpleNamespace(features=features))
    told = [{"article": "é".encode(), "options": [[b"x", "ü".encode()], [b"y"]]}]
    monkeypatch.setattr(
        tfds_source, "open_split", lambda name, wanted: (builder, "dev")
    )
    monkeypatch.setattr(tfds_source, "read_split", lambda *a: iter(told))
    (found,) = tables.read_rows("tfds:race:dev", "data.valid", {})
    assert found.cells == {"article": "é", "options": [["x", "ü"], ["y"]]}
