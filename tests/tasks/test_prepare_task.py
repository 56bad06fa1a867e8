# SPDX-License-Identifier: Apache-2.0
"""From config keys to rows: task types, and keys without effect."""

import pytest

from bertjax import UserError
from bertjax.assembly import command_line
from bertjax.config import schema
from bertjax.tasks.catalog import TASKS
from bertjax.tasks.prepare_task import (
    check,
    check_settings,
    make_form,
    prepare,
    rename,
)
from bertjax.tasks.task_type import get_task_type, load_task_type

TEXTS = "finetune/classify.py", "task.text=a", "task.label=b"


@pytest.mark.parametrize(
    ("config", "given", "said"),
    [
        (
            ("finetune/classify.py:task=mrpc", "objective=regress"),
            (),
            "equivalent has no effect with objective=regress",
        ),
        ((*TEXTS, "objective=regress"), ("task.metrics=f1",), "task.metrics"),
        (TEXTS, ("task.metrics=pearson",), "task.metrics"),
        (TEXTS, ("task.choices=c",), "task.choices=c has no effect"),
        (
            ("finetune/tag.py",),
            ("task.text_pair=2",),
            "task.text_pair=2 has no effect with objective=tag",
        ),
        (
            ("finetune/qa.py",),
            ("task.text=query",),
            "has no effect with objective=span: it is always 'question'",
        ),
        (("finetune/qa.py",), ("task.labels=a,b",), "task.labels=a,b has no effect"),
        (
            ("finetune/retrieve.py",),
            ("task.labels=a,b",),
            "task.labels=a,b has no effect",
        ),
        (("finetune/choose.py", *TEXTS[1:]), (), "task.choices is empty"),
        (TEXTS, ("task.text=b",), "task.text=b and task.label=b are one column"),
        (TEXTS, ("task.text_pair=b",), "task.text_pair=b and task.label=b are one"),
        (TEXTS, ("task.text_pair=a",), "task.text and task.text_pair are one column"),
    ],
)
def test_keys_without_effect_are_refused(config, given, said):
    file, *more = config
    more = [f"--config.{key}" for key in (*more, *given, "data.vocab=none")]
    with pytest.raises(UserError) as e:
        check(command_line.parse([f"--config={file}", *more]).config)
    assert said in str(e.value)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("read", "pooling=cls"),
        ("read", "normalize=False"),
        ("rag", "question_length=9"),
    ],
)
def test_settings_of_an_index_need_one(name, setting):
    given = [f"--config=finetune/{name}.py", f"--config.task.{setting}"]
    config, usual = command_line.parse(given).config, schema.base().task
    said = rf"task\.{setting} has no effect with objective={name} where task\.index is"
    with pytest.raises(UserError, match=said):
        check_settings(config, usual)
    config.task.index = "index"
    check_settings(config, usual)


@pytest.mark.parametrize(
    ("given", "objective", "columns", "train"),
    [
        (["tag.py"], "tag", ("1", "", "-1"), ""),
        (["qa.py"], "span", ("question", "context", "answers"), ""),
        (["retrieve.py"], "retrieve", ("query", "positive", "negatives"), ""),
        (["classify.py", "objective=tag"], "tag", ("1", "", "-1"), ""),
        (["tag.py", "task.text=2"], "tag", ("2", "", "-1"), ""),
        (
            ["retrieve.py", "task.text_pair="],
            "retrieve",
            ("query", "", "negatives"),
            "",
        ),
        (
            ["tag.py:task=conll2003"],
            "tag",
            ("tokens", "", "ner"),
            "tfds:conll2003:train",
        ),
        (
            ["tag.py", "task.name=conll2003", "data.train=a", "data.valid=b"],
            "tag",
            ("tokens", "", "ner"),
            "a",
        ),
        (
            ["tag.py:task=rte"],
            "classify",
            ("sentence1", "sentence2", "label"),
            "tfds:glue/rte:train",
        ),
        (["retrieve.py:task=beir"], "retrieve", ("query", "positive", "negatives"), ""),
    ],
)
def test_columns_that_need_not_be_given(given, objective, columns, train):
    file, *keys = given
    keys = [f"--config.{key}" for key in keys]
    made = command_line.parse([f"--config=finetune/{file}", *keys]).config
    task = made.task
    assert (task.text, task.text_pair, task.label) == columns
    assert made.objective == objective and made.data.train == train


def test_every_named_task_passes(vocabulary):
    """A named task fits its objective, in any config that names it."""
    for name, task in TASKS.items():
        assert {*task.metrics} <= {*load_task_type(task.objective).metrics}
        args = [
            f"--config=finetune/tag.py:task={name}",
            f"--config.data.vocab={vocabulary}",
        ]
        check(command_line.parse(args).config)


def test_the_first_measure_of_a_benchmark_counts():
    for name, first in (
        ("beir", "ndcg@10"),
        ("msmarco", "mrr@10"),
        ("conll2003", "f1"),
    ):
        assert TASKS[name].metrics[0] == first


@pytest.mark.parametrize("name", ["read", "rag", "rerank"])
def test_rows_of_two_columns_are_given_both(name):
    config = command_line.parse([f"--config=finetune/{name}.py"]).config
    said = rf"--columns=a names 1 text: rows of objective={name} have 2$"
    with pytest.raises(UserError, match=said):
        rename(config, "a")
    rename(config, "a,b")
    assert make_form(config).columns == ("a", "b")
    if name == "rag":  # a step finds the passages
        config.task.index = "folder"
        rename(config, "a")
        assert make_form(config).columns == ("a",)


def test_labels_are_different():
    file, *more = *TEXTS, "task.labels=0,1,0"
    made = command_line.parse(
        [f"--config={file}", *(f"--config.{key}" for key in more)]
    ).config
    with pytest.raises(UserError, match="'0' occurs twice"):
        make_form(made)


@pytest.mark.parametrize("name", ["tag", "qa", "retrieve"])
def test_the_configs_pass(name):
    with pytest.raises(UserError, match=r"data\.vocab=x: no such file"):
        check(
            command_line.parse(
                [f"--config=finetune/{name}.py", "--config.data.vocab=x"]
            ).config
        )


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("classify", "FILE.tsv, .csv or .jsonl"),
        ("tag", "FILE.bio, .conll, .tsv, .txt or .jsonl"),
        ("span", "FILE.json"),
    ],
)
def test_a_directory_is_told_what_is_wanted(tmp_path, name, wanted):
    file = {"tag": "tag.py", "span": "qa.py"}.get(name, "classify.py")
    more = TEXTS[1:] if name == "classify" else ()
    more = [f"--config.{key}" for key in (*more, f"data.train={tmp_path}")]
    config = command_line.parse(
        [f"--config=finetune/{file}", "--config.data.vocab=x", *more]
    )
    said = rf"data\.train={tmp_path}: a directory; write {tmp_path}/{wanted}$"
    with pytest.raises(UserError, match=said):
        check(config.config)
    with pytest.raises(UserError, match=said):
        load_task_type(name).read(
            str(tmp_path), "data.train", {"task.text": "a"}, print
        )


def test_what_is_read_twice_is_said(vocabulary, tmp_path):
    table = tmp_path / "t.tsv"
    table.write_text("a\tb\nclear\t1\nwrong\t0\n")
    more = f"data.vocab={vocabulary}", f"data.train={table},{table}"
    keys = [f"--config.{key}" for key in (*TEXTS[1:], *more, f"data.valid={table}")]
    said = []
    made = prepare(
        command_line.parse([f"--config={TEXTS[0]}", *keys]).config, said.append
    )
    assert made.parts["train"].n == 4
    assert said[:2] == [
        f"data.train reads {table} 2 times, so its text counts 2 times",
        f"data.train and data.valid both read {table}: the model is scored on rows "
        "that it learns from",
    ]


def test_an_objective_of_running_text_has_no_rows():
    with pytest.raises(UserError, match=r"^objective=mlm\+nsp learns from"):
        get_task_type("mlm+nsp")
