# SPDX-License-Identifier: Apache-2.0
"""Our keys in config.json of an exported model."""

import pytest

from bertjax import UserError
from bertjax.config import base
from bertjax.tasks import exported


def config(objective, **task):
    made = base()
    made.objective = objective
    made.task.update(task)
    return made


def test_columns_there_and_back():
    told = {"text": "premise", "text_pair": "claim", "choices": "", "label": "gold"}
    ours = config("classify", **told)
    said = exported.to_json({"labels": ["no", "yes"]}, ours)
    assert said == {f"bertjax_{key}": name for key, name in told.items()}
    theirs = config("classify", text="text", label="label")
    assert exported.from_json(said, theirs, "x") == {}
    assert theirs.task == ours.task
    assert exported.from_json({}, theirs, "x") == {} and theirs.task == ours.task
    with pytest.raises(UserError, match="x: bertjax_label=3 is no column's name"):
        exported.from_json({"bertjax_label": 3}, theirs, "x")


def test_limits_and_threshold_there_and_back():
    ours = config("span", stride=9, question_length=70, answer_length=2)
    told = {"threshold": 1.5}
    said = exported.to_json(told, ours)
    assert sorted(said) == [
        "bertjax_answer_length",
        "bertjax_question_length",
        "bertjax_stride",
        "bertjax_threshold",
    ]
    theirs = config("span")
    assert exported.from_json(said, theirs, "x") == told
    assert theirs.task == ours.task


def test_what_has_no_task_tells_nothing():
    assert exported.to_json({}, config("mlm")) == {}
    assert exported.to_json({"labels": []}, config("retrieve")) == {}
    assert exported.from_json({}, config("span"), "x") == {}


@pytest.mark.parametrize(
    ("key", "value"), [("threshold", "high"), ("stride", 0), ("answer_length", 2.5)]
)
def test_what_no_export_says(key, value):
    words = f"x: bertjax_{key}={value!r} is no number"
    with pytest.raises(UserError, match=words):
        exported.from_json({f"bertjax_{key}": value}, config("span"), "x")
