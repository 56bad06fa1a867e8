# SPDX-License-Identifier: Apache-2.0
"""Rows of texts: layout, truncation, labels."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax import UserError
from bertjax.tasks import task_rows
from bertjax.tasks.tables import Row
from bertjax.tasks.task_rows import Asking, Form, Ragged
from bertjax.tasks.text_rows import Texts, find_labels, make_texts, read_labels

SPECIALS = SimpleNamespace(cls_id=1, sep_id=2, pad_id=0)
FORM = Form(("a", "b"), "label", ("no", "yes"), 1, ("accuracy",))
LISTS = st.lists(st.integers(5, 40), max_size=12)


class Letters:
    """A tokenizer in which the ids are those of letters."""

    vocab_size = 200

    def encode_batch(self, texts):
        return [[ord(ch) for ch in text] for text in texts]


def made(*texts, form=FORM):
    columns = [Ragged.of(column) for column in texts]
    form = form._replace(columns=form.columns[: len(columns)])
    return Texts(form, np.zeros(50, np.int64), tuple(columns))


def test_layout():
    texts = made([[7, 8], [5]], [[9], [6, 6]]).plan(8)
    batch = texts.gather(np.array([0, 1]), None, SPECIALS)
    assert batch["input_ids"].tolist() == [
        [1, 7, 8, 2, 9, 2, 0, 0],
        [1, 5, 2, 6, 6, 2, 0, 0],
    ]
    assert batch["token_type_ids"].tolist() == [
        [0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 0, 0],
    ]
    assert batch["attention_mask"].sum() == 12
    roberta = made([[7]], [[9]], form=FORM._replace(separators=2)).plan(8)
    row = roberta.gather(np.array([0]), None, SPECIALS)["input_ids"][0]
    assert row.tolist() == [1, 7, 2, 2, 9, 2, 0, 0]


@given(LISTS, LISTS, st.integers(5, 20), st.sampled_from([1, 2]))
def test_the_longer_text_loses_its_end(a, b, length, separators):
    """Compare with removing one token at a time; of equally long texts the second loses
    its last token first."""
    form = FORM._replace(separators=separators)
    texts = made([a], [b], form=form)
    if length < 4 + separators:
        with pytest.raises(UserError):
            texts.plan(length)
        return
    texts, x, y = texts.plan(length), list(a), list(b)
    while len(x) + len(y) > length - 2 - separators:
        (x if len(x) > len(y) else y).pop()
    row = texts.gather(np.array([0]), None, SPECIALS)
    real = row["input_ids"][0][row["attention_mask"][0] > 0]
    assert real.tolist() == [1, *x, *[2] * separators, *y, 2]
    assert texts.truncated(np.array([0])) == len(a) + len(b) - len(x) - len(y)
    assert texts.lengths().tolist() == [len(real)]


def table(*cells):
    return [
        Row({"a": a, "b": "y", "label": label}, f"t.tsv:{i + 2}")
        for i, (a, label) in enumerate(cells)
    ]


def test_labels_are_found_and_ordered():
    assert read_labels(table(("x", "10"), ("x", "9"), ("x", "-1")), "label") == (
        "-1",
        "9",
        "10",
    )
    assert read_labels(table(("x", "b"), ("x", " a ")), "label") == ("a", "b")
    for odd in ("²", "--5", "٣", "9" * 5000):  # not whole numbers, or too long
        assert {*read_labels(table(("x", "1"), ("x", odd)), "label")} == {"1", odd}
    assert read_labels(table(("x", True), ("x", False)), "label") == ("false", "true")


@pytest.mark.parametrize(
    ("cells", "form", "said"),
    [
        ([("x", "maybe")], FORM, "t.tsv:2: task.labels"),
        ([("x", "yes"), ("x", " ")], FORM, "t.tsv:3: the label is empty"),
        (
            [("x", "1.5"), ("x", "nan")],
            FORM._replace(labels=()),
            "'nan' has to be a number",
        ),
        ([("x", "1e99")], FORM._replace(labels=()), "'1e99' has to be a number"),
        ([("x", "1_0")], FORM._replace(labels=()), "'1_0' has to be a number"),
        ([("x", " inf")], FORM._replace(labels=()), "'inf' has to be a number"),
        ([("x", "٣")], FORM._replace(labels=()), "'٣' has to be a number"),
        ([("x", "1-2")], FORM._replace(labels=()), "'1-2' has to be a number"),
        ([(3, "yes")], FORM, "t.tsv:2: the a has to be a text, and is 3"),
        ([("x", None)], FORM, "t.tsv:2: the label is empty"),
        (
            [("x", ["yes"])],
            FORM,
            "t.tsv:2: the label has to be a label, and is ['yes']",
        ),
    ],
)
def test_bad_labels(cells, form, said):
    with pytest.raises(UserError) as e:
        make_texts(table(*cells), form, Letters(), labelled=True)
    assert said in str(e.value)


def test_what_is_refused_of_label_columns():
    for cells, said in {
        (("x", "a"), ("x", "")): "t.tsv:3: the label is empty",
        (("x", "a"), ("x", float("nan"))): "t.tsv:3: the label is empty",
        (("x", "a"), ("x", "a")): "every row has the label 'a'",
        tuple(("x", str(i)) for i in range(40)): "objective=regress",
    }.items():
        with pytest.raises(UserError) as e:
            read_labels(table(*cells), "label")
        assert said in str(e.value)


def test_a_column_of_texts_names_what_would_list_its_classes():
    """The message for --control once named --controls, which bertjax.probe lacks."""
    cells = table(*(("x", f"a text {i}") for i in range(40)))
    for asking, said in {
        None: "task.label=label: .* or list the classes in task.labels if these",
        Asking("--control", ""): "--control=label: .*the column of the labels$",
    }.items():
        with pytest.raises(UserError, match=said):
            read_labels(cells, "label", asking=asking)


def numbered(n, label):
    return table(*((f"text {i}", label(i)) for i in range(n)))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        # STS-B's scores: many rows, few of which share a score.
        (numbered(2000, lambda i: f"{i % 140 / 28:.3f}"), "objective=regress"),
        (numbered(12, lambda i: f"a sentence {i % 7}"), "'a sentence 0', 'a sentence"),
        (numbered(12, lambda i: f"a sentence {i % 7}"), "task.label=label: 7 labels"),
        (numbered(400, str), "objective=regress"),
        # Text and label are swapped, and each sentence occurs three times.
        (table(*((["no", "yes"][i % 2], f"{i // 3} is") for i in range(99))), "33"),
    ],
)
def test_labels_that_no_model_could_be_meant_by(rows, said):
    with pytest.raises(UserError) as e:
        find_labels(rows, FORM._replace(columns=("a",), labels=()))
    assert said in str(e.value) and "task.label=label" in str(e.value)
    named = FORM._replace(
        columns=("a",), labels=tuple({r.cells["label"] for r in rows})
    )
    assert find_labels(rows, named) is named  # listed labels are not questioned


@pytest.mark.parametrize(
    ("rows", "classes"),
    [
        (numbered(6, "intent {}".format), 6),  # one text per class
        (numbered(40, lambda i: f"{i % 9 / 2}"), 9),  # stars in halves
        (numbered(40, lambda i: f"{i % 16}.0"), 16),  # whole numbers, as from pandas
        (numbered(600, lambda i: f"class {i % 300}"), 300),
    ],
)
def test_few_rows_and_many_classes_may_be(rows, classes):
    found = find_labels(rows, FORM._replace(columns=("a",), labels=()))
    assert len(found.labels) == classes


def test_empty_texts_are_kept_and_said():
    said = []
    found = make_texts(
        table(("", "yes"), ("x", "no")), FORM, Letters(), True, said.append
    )
    assert found.n == 2 and found.labels.tolist() == [1, 0]
    assert said == ["1 row with an empty a, kept: t.tsv:2"]
    batch = found.plan(8).gather(np.array([0]), None, SPECIALS)
    assert batch["input_ids"][0].tolist() == [1, 2, ord("y"), 2, 0, 0, 0, 0]
    assert batch["labels"].tolist() == [1]


def test_content_decides_the_hash():
    one = make_texts(table(("x", "yes")), FORM, Letters(), True)
    same = make_texts(table(("x", "yes")), FORM, Letters(), True)
    assert one.content_hash == same.content_hash
    others = [
        make_texts(table(("z", "yes")), FORM, Letters(), True),
        make_texts(table(("x", "no")), FORM, Letters(), True),
        make_texts(table(("x", "yes")), FORM._replace(separators=2), Letters(), True),
    ]
    assert len({one.content_hash, *(o.content_hash for o in others)}) == 4


def test_a_column_is_encoded_in_blocks(monkeypatch):
    # The lists that a tokenizer returns for a whole column do not fit in memory.
    monkeypatch.setattr(task_rows, "BLOCK", 4)
    seen = []

    class Watched(Letters):
        def encode_batch(self, texts):
            seen.append(len(texts))
            return super().encode_batch(texts)

    texts = ["", "abc", "d", "", "ef", "", "", "g", "hi"]
    rows = [Row({"a": text}, f"t.tsv:{i}") for i, text in enumerate(texts)]
    form = Form(("a",), "label", ("no", "yes"), 1, ("accuracy",))
    made = make_texts(rows, form, Watched(), labelled=False)
    whole = Ragged.of(Letters().encode_batch(texts))
    assert seen == [4, 4, 1]
    (own,) = made.texts
    for one, other in ((own.tokens, whole.tokens), (own.offsets, whole.offsets)):
        assert one.dtype == other.dtype and one.tolist() == other.tolist()
    assert len(Ragged.encode(Letters(), []).lengths) == 0


def test_classes_of_one_name_are_one():
    """An imported model may have several classes of the same name."""
    rows = SimpleNamespace(form=FORM._replace(labels=("a", "b", "a")))
    logits = {"scores": np.log([[0.3, 0.4, 0.3]])}
    (found,) = Texts.answers(rows, logits, [])
    assert found["label"] == "a" and found["score"] == pytest.approx(0.6)
    assert found["probabilities"] == pytest.approx({"a": 0.6, "b": 0.4})
