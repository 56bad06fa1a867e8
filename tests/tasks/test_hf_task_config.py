# SPDX-License-Identifier: Apache-2.0
"""bertjax's keys in the config.json of an exported model."""

import pytest

from bertjax import UserError
from bertjax.config.schema import base
from bertjax.tasks import hf_task_config
from bertjax.tasks.prepare_task import settle


def config(objective, **task):
    made = base()
    made.objective = objective
    made.task.update(task)
    settle(made)
    return made


def test_columns_there_and_back():
    told = {"text": "premise", "text_pair": "claim", "choices": "", "label": "gold"}
    ours = config("classify", **told)
    said = hf_task_config.to_json({"labels": ["no", "yes"]}, ours)
    assert said == {f"bertjax_{key}": name for key, name in told.items() if name}
    theirs = config("classify", text="text", label="label")
    assert hf_task_config.from_json(said, theirs, "x") == {}
    assert theirs.task == ours.task
    assert hf_task_config.from_json({}, theirs, "x") == {} and theirs.task == ours.task


def test_what_an_imported_model_did_not_say_is_not_told():
    theirs, raw = config("classify", text="text", label="label"), {"architectures": []}
    task = {"labels": ["no", "yes"]}
    assert hf_task_config.to_json(task, theirs, raw) == {}
    said = {"bertjax_text": "text"}
    assert hf_task_config.to_json(task, theirs, raw | said) == said
    assert (
        len(hf_task_config.to_json(task, theirs, {"model_type": "bert"})) == 2
    )  # grown


@pytest.mark.parametrize(
    ("objective", "key", "value", "words"),
    [
        ("classify", "label", 3, "bertjax_label=3 has to be a text"),
        ("classify", "text", "", "bertjax_.* in config.json: task.text is empty"),
        ("classify", "label", "", "task.label is empty"),
        ("classify", "choices", "ends", "task.choices=ends has no effect with obj"),
        ("classify", "metrics", "f2", "task.metrics='f2' is unknown"),
        ("classify", "text_pair", "gold", "gold"),
        ("choose", "choices", "", "task.choices is empty"),
        ("choose", "choices", ",", "task.choices is empty"),
        ("tag", "text_pair", "2", "task.text_pair=2 has no effect with objective=tag"),
        ("span", "threshold", 10**400, "bertjax_threshold=1000.* has to be a number"),
        ("span", "threshold", float("nan"), "bertjax_threshold=nan has to be a number"),
    ],
)
def test_columns_that_cannot_be(objective, key, value, words):
    usual = {"text": "text", "label": "gold", "choices": "ends"}
    usual["choices"] *= objective == "choose"
    made = config(objective, **({} if objective == "span" else usual))
    with pytest.raises(UserError, match=f"^x: .*{words}"):
        hf_task_config.from_json({f"bertjax_{key}": value}, made, "x")


def test_limits_and_threshold_there_and_back():
    ours = config("span", stride=9, question_length=70, answer_length=2)
    told = {"threshold": 1.5}
    said = hf_task_config.to_json(told, ours)
    names = "answer_length question_length stride threshold"
    assert {*said} == {f"bertjax_{name}" for name in names.split()}
    theirs = config("span")
    assert hf_task_config.from_json(said, theirs, "x") == told
    assert theirs.task == ours.task


def test_what_has_no_task_tells_nothing():
    assert hf_task_config.to_json({}, config("mlm")) == {}
    assert hf_task_config.to_json({"labels": []}, config("retrieve")) == {}


@pytest.mark.parametrize(
    ("key", "value"), [("threshold", "high"), ("stride", 0), ("answer_length", 2.5)]
)
def test_what_no_export_says(key, value):
    words = f"x: bertjax_{key}={value!r} has to be a number"
    with pytest.raises(UserError, match=words):
        hf_task_config.from_json({f"bertjax_{key}": value}, config("span"), "x")
