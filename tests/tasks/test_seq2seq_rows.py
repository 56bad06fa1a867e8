# SPDX-License-Identifier: Apache-2.0
"""Rows of texts and their targets: layout, truncation, scores, refusals."""

import math
from string import ascii_lowercase
from types import SimpleNamespace

import numpy as np
import pytest

from bertjax import UserError
from bertjax.assembly import command_line
from bertjax.data import counter_rng
from bertjax.tasks import prepare_task, tables
from bertjax.tasks.task_rows import Form, Targets
from bertjax.tasks.types.seq2seq import TASK_TYPE, make_sequences, targets_of

SPECIALS = SimpleNamespace(cls_id=1, sep_id=2, pad_id=0)
FORM = Form(("text",), "target", (), 1, ("perplexity",), targets=Targets(3))


class Letters:
    """A tokenizer of letters: a is 5; other characters are unknown."""

    vocab_size, lower_case, unk_id, kind = 200, True, 4, "ids"
    pieces = tuple(map(str, range(vocab_size)))
    special_ids = np.arange(5)

    def decode(self, ids):
        return " ".join(map(str, ids))

    def encode_batch(self, texts):
        ids = {ch: 5 + i for i, ch in enumerate(ascii_lowercase)}
        return [[ids.get(ch, self.unk_id) for ch in text] for text in texts]


def made(*rows, form=FORM, labelled=True):
    examples = [
        tables.Row(dict(zip(("text", "target"), row, strict=False)), f"t.jsonl:{i + 1}")
        for i, row in enumerate(rows)
    ]
    return make_sequences(examples, form, Letters(), labelled)


def batch_of(rows, keys=None):
    return rows.gather(np.arange(rows.n), keys, SPECIALS)


def test_layout():
    batch = batch_of(made(("cde", "ab"), ("f", "abc")).plan(10))
    assert {name: values.tolist() for name, values in batch.items()} == {
        "input_ids": [[1, 7, 8, 9, 2, 5, 6, 2, 0, 0], [1, 10, 2, 5, 6, 7, 2, 0, 0, 0]],
        "attention_mask": [[1] * 8 + [0] * 2, [1] * 7 + [0] * 3],
        "attention_steps": [[0] * 5 + [1, 2, 3, 0, 0], [0] * 3 + [1, 2, 3, 4, 0, 0, 0]],
        "lm_positions": [[4, 5, 6, 0], [2, 3, 4, 5]],
        "lm_ids": [[5, 6, 2, 0], [5, 6, 7, 2]],
        "lm_weights": [[1, 1, 1, 0], [1, 1, 1, 1]],
    }


def test_a_causal_model_has_no_steps():
    form = FORM._replace(targets=Targets(3, "causal"))
    rows = made(("cde", "ab"), form=form)
    assert "attention_steps" not in batch_of(rows.plan(10))
    assert rows.content_hash != made(("cde", "ab")).content_hash


@pytest.mark.parametrize("bare", [False, True])
def test_a_decoder_has_a_side_of_its_own(bare):
    form = FORM._replace(targets=Targets(3, "decoder", bare))
    rows = made(("cde", "ab"), ("f", "abcd"), form=form).plan(6)
    batch = batch_of(rows)
    sides = {
        "input_ids": [[1, 7, 8, 9, 2, 0], [1, 10, 2, 0, 0, 0]],
        "lm_ids": [[1, 5, 6, 2, 0], [1, 5, 6, 7, 2]],
        "decoder_input_ids": [[2, 1, 5, 6, 0], [2, 1, 5, 6, 7]],
    }
    if bare:  # T5
        sides = {
            "input_ids": [[7, 8, 9, 2, 0, 0], [10, 2, 0, 0, 0, 0]],
            "lm_ids": [[5, 6, 2, 0], [5, 6, 7, 2]],
            "decoder_input_ids": [[0, 5, 6, 0], [0, 5, 6, 7]],
        }
    for name, ids in sides.items():
        assert batch[name].tolist() == ids
    real = batch["lm_weights"] > 0
    assert (batch["decoder_attention_mask"] == real).all()
    assert real.sum(axis=1).tolist() == [4 - bare, 5 - bare]
    text = batch["attention_mask"].sum(axis=1)
    assert text.tolist() == rows.lengths().tolist() == [5 - bare, 3 - bare]
    assert batch["text_tokens"].tolist() == (text + real.sum(axis=1)).tolist()
    assert "attention_steps" not in batch
    lines = dict(rows.describe({k: v[1] for k, v in batch.items()}, 1, Letters()))
    assert lines["target"] == "1 5 6 7 2"[2 * bare :]
    # Rows to answer have only the decoder's first token.
    asked = batch_of(made(("cde",), form=form, labelled=False).plan(6))
    start = 0 if bare else 2
    assert asked["decoder_input_ids"].tolist() == [[start]]
    assert asked["input_ids"].tolist() == sides["input_ids"][:1]


def test_two_texts():
    form = FORM._replace(columns=("text", "more"), separators=2)
    cells = {"text": "a", "more": "b", "target": "c"}
    rows = make_sequences([tables.Row(cells, "t:1")], form, Letters(), True)
    batch = batch_of(rows.plan(12))
    assert batch["input_ids"][0, :9].tolist() == [1, 5, 2, 2, 6, 2, 7, 2, 0]
    assert batch["attention_steps"][0, 5:9].tolist() == [0, 1, 2, 0]


def test_the_text_is_cut_and_the_target_kept():
    """A text keeps 10 - (3 + 1) tokens with any target."""
    rows = made(("abcdefgh", "xyz"), ("abcdefgh", "x"), ("ab", "vwxyz")).plan(10)
    batch = batch_of(rows)
    assert batch["input_ids"].tolist() == [
        [1, 5, 6, 7, 8, 2, 28, 29, 30, 2],
        [1, 5, 6, 7, 8, 2, 28, 2, 0, 0],
        [1, 5, 6, 2, 26, 27, 28, 2, 0, 0],
    ]
    assert rows.lengths().tolist() == batch["attention_mask"].sum(axis=1).tolist()
    assert rows.truncated(np.arange(3)).tolist() == [4, 4, 2]
    assert [*rows.notes()] == [
        "2 of 3 texts are cut at 6 tokens: data.length=10 less 4 for the target",
        "1 of 3 targets cut at task.target_length=3",
    ]


def test_what_is_answered_is_read_as_what_is_learnt():
    """A text without a target is the same, in a row as short as possible."""
    from dataclasses import replace

    learnt = made(("abcdefgh", "xyz")).plan(10)
    asked = made(("abcdefgh",), labelled=False).plan(10)
    narrow = replace(asked, length=int(asked.lengths()[0]))
    batch = batch_of(narrow)
    assert batch["input_ids"].tolist() == [[1, 5, 6, 7, 8, 2]]
    assert (
        batch["input_ids"][0].tolist() == batch_of(learnt)["input_ids"][0, :6].tolist()
    )
    assert not batch["attention_steps"].any() and "lm_ids" not in batch


def test_written_texts_are_scored_and_answered():
    """Special tokens, ids beyond the vocabulary and tokens after the end are left
    out."""
    form = FORM._replace(metrics=("distinct1", "exact", "perplexity"))
    rows = made(("a", ["b", "cd"]), ("a", "b"), ("a", "b"), form=form).plan(9)
    outputs = {
        "nats": np.zeros(3),
        "right": np.zeros(3),
        "generated_ids": np.array(
            [[7, 200, 8, 2, 0], [2, 0, 0, 0, 0], [6, 6, 6, 6, 0]]
        ),
        "generated_lengths": np.array([4, 1, 4]),
        "generated_scores": np.array([-0.5, -1.5, -2]),
    }
    assert rows.writes and not made(("a", "b")).writes
    found = rows.score(outputs, np.arange(3))
    assert found == {"distinct1": 3 / 6, "exact": 1 / 3, "perplexity": 1.0}
    asked = made(("a",), ("a",), ("a",), labelled=False)
    assert asked.writes
    told = [*asked.answers(outputs, [])]
    assert told[0] == {"text": "7 8", "score": -0.5} and told[1]["text"] == ""


def test_too_short():
    with pytest.raises(
        UserError, match=r"length=6 is too short: rows need 7, of which"
    ):
        made(("a", "b")).plan(6)


def test_of_several_targets_one_is_drawn_an_epoch():
    rows = made(("a", ["b", "cd", "efg"])).plan(10)
    key = [counter_rng.fold(0, "epoch", np.array([i])) for i in range(300)]
    drawn = [int(batch_of(rows, k)["lm_ids"][0, 0]) for k in key]
    counts = np.bincount(drawn, minlength=10)[[6, 7, 9]]
    assert counts.sum() == 300 and (abs(counts - 100) < 40).all()
    # The first target is scored; there is room for the longest.
    scored = rows.for_scores()
    assert {int(batch_of(scored, k)["lm_ids"][0, 0]) for k in key[:9]} == {6}
    assert rows.lengths().tolist() == [7]


def test_perplexity_is_over_all_tokens():
    """It is not a mean of rows: 3 tokens have 1.2 nats in all, and 2 tokens 1.3."""
    form = FORM._replace(metrics=("perplexity", "accuracy"))
    rows = made(("a", "bc"), ("a", "b"), form=form).plan(9)
    outputs = {"nats": np.float32([1.2, 1.3]), "right": np.float32([3, 1])}
    found = rows.score(outputs, np.arange(2))
    assert found == pytest.approx({"perplexity": math.exp(2.5 / 5), "accuracy": 0.8})
    huge = {"nats": np.float32([1e6, 0]), "right": np.zeros(2)}
    assert rows.score(huge, np.arange(2))["perplexity"] == math.inf


@pytest.mark.parametrize(
    "value, said",
    [
        (7, "t.jsonl:1: the target has to be a text, or a list of texts, and is 7"),
        (["a", None], "t.jsonl:1: the target has to be a text, or a list of texts"),
        (" ", "t.jsonl:1: the target is empty"),
        ([], "t.jsonl:1: the list of target is empty"),
    ],
)
def test_targets_that_are_none(value, said):
    with pytest.raises(UserError) as e:
        targets_of(tables.Row({"target": value}, "t.jsonl:1"), "target")
    assert str(e.value).startswith(said) and "\n" not in str(e.value)


def config_of(*flags):
    return command_line.parse(["--config=finetune/seq2seq.py", *flags]).config


def test_targets_that_rouge_does_not_know_are_said():
    pytest.importorskip("rouge_score")
    rows = ("a", "巴黎"), ("a", ["巴黎", "Paris"]), ("a", "42")
    cells = [{"text": text, "target": target} for text, target in rows]
    examples = [tables.Row(one, f"t.jsonl:{i}") for i, one in enumerate(cells, 1)]
    said = []
    form = FORM._replace(metrics=("rougeL",))
    make_sequences(examples, form, Letters(), True, said.append)
    assert said == [
        "1 row with a target without a letter a to z or a digit: its ROUGE is 0: "
        "t.jsonl:1"
    ]


def test_columns_are_text_and_target():
    config = config_of("--config.data.vocab=x")
    prepare_task.check_task(config)
    form = prepare_task.make_form(config)
    assert form.keys() == {"task.text": "text", "task.target": "target"}
    assert form.keys(flags=True) == {"--columns: TEXT": "text", "--label": "target"}
    assert form.targets == Targets(64, "prefix")
    assert TASK_TYPE.head_options(config.task, ()) == {"target_length": 64}
    for flags, targets in (
        (["model.is_decoder=True"], Targets(64, "causal")),
        (["model.family=bart", "model.size=tiny"], Targets(64, "decoder")),
        (["model.family=t5", "task.target_length=9"], Targets(9, "decoder", True)),
    ):
        config = config_of(*(f"--config.{flag}" for flag in flags))
        assert prepare_task.make_form(config).targets == targets


@pytest.mark.parametrize(
    "flag, said",
    [
        ("task.label=x", "task.label=x has no effect with objective=seq2seq"),
        ("task.target=text", "task.text=text and task.target=text are one column"),
        ("task.metrics=f1", "task.metrics='f1' is unknown"),
    ],
)
def test_what_is_refused_of_a_config(flag, said):
    with pytest.raises(UserError) as e:
        prepare_task.check_task(config_of(f"--config.{flag}"))
    assert said in str(e.value) and "\n" not in str(e.value)
    classify = command_line.parse(["--config=finetune/classify.py"]).config
    usual, classify.task.target = classify.task.copy_and_resolve_references(), "x"
    with pytest.raises(UserError, match=r"target=x has no effect .* objective=seq2seq"):
        prepare_task.check_settings(classify, usual)


def test_a_table_without_the_column(tmp_path):
    table = tmp_path / "rows.tsv"
    table.write_text("text\tlabel\na\tb\n")
    keys = {"task.text": "text", "task.target": "target"}
    with pytest.raises(UserError, match=r"rows\.tsv:.* task\.target='target' is unkn"):
        TASK_TYPE.read(str(table), "data.train", keys)
