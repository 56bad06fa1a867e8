# SPDX-License-Identifier: Apache-2.0
"""From chats to answers: runs of configs/plato.py, resumed, shown, and generating."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from conftest import read_rows, refused, succeeded, train_losses
from resuming import check_resuming

import bertjax
from bertjax import UserError, evaluate, generate, show
from bertjax.generation import dialogues
from bertjax.serving.served_model import make_served

NAMES = ["ann", "bob", "cem"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    rng = random.Random(0)
    for name, number in (("train", 120), ("valid", 20)):
        lines = []
        for _ in range(number):
            turns = []
            for _ in range(rng.randint(1, 5)):
                n = rng.randint(1, 9)
                for text in (f"how many is {n} and one ?", f"that makes {n + 1} ."):
                    turns.append({"speaker": rng.choice(NAMES), "text": text})
            lines.append(json.dumps({"turns": turns, "knowledge": "counting"}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return [
        "--config=plato.py:smoke",
        f"--config.data.train={folder / 'train.jsonl'}",
        f"--config.data.valid={folder / 'valid.jsonl'}",
        f"--config.data.cache={folder / 'stores'}",
        "--config.data.vocab_size=120",
        "--config.model.hidden_size=32",
        "--config.model.num_hidden_layers=1",
        "--config.total.steps=12",
        "--config.eval.every.steps=6",
        "--config.eval.examples=16",
        "--config.checkpoint.every.steps=4",
    ]


@pytest.fixture(scope="module")
def workdir(flags, command, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "whole"
    succeeded(command("train", *flags, f"--workdir={path}"))
    return path


def test_a_run_learns_and_its_answers_are_scored(workdir, command):
    losses = train_losses(workdir)
    assert losses[-1] < losses[0] - 0.2
    row = read_rows(workdir)[-1]
    assert 0 < row["eval/valid/dialogue_loss"] < 6
    assert row["eval/valid/dialogue_accuracy"] > 0
    scored = succeeded(command("evaluate", f"--model={workdir}", "--json"))
    scores = json.loads(scored.stdout)
    assert scores["perplexity"] == pytest.approx(np.exp(scores["dialogue_loss"]))


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit(workdir, flags, command, tmp_path):
    check_resuming(command, flags, workdir, tmp_path / "parts")


def test_rows_are_shown_with_their_roles(flags, capsys):
    assert show.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:1] == ["role"] for line in lines)
    shown = []
    for hosts in (1, 4):
        assert show.main([*flags, "--json", f"--hosts={hosts}"]) == 0
        shown.append(json.loads(capsys.readouterr().out))
    assert shown[0] == shown[1]
    assert shown[0]["predicted"] > 100 and shown[0]["segments_per_row"] > 1


def test_conversations_are_answered(workdir, tmp_path, capsys):
    model = bertjax.load(str(workdir))
    said = [{"speaker": "ann", "text": "how many is 3 and one ?"}]
    prompts = [{"turns": said}, {"turns": said * 40, "knowledge": "counting"}]
    written = model.generate(prompts, max_new_tokens=5)
    assert all(len(one["ids"]) <= 5 for outputs in written for one in outputs)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    given = [f"--model={workdir}", f"--input={tmp_path / 'p.jsonl'}"]
    assert generate.main([*given, "--max_new_tokens=5", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    assert [line["outputs"] for line in lines] == written
    # A plain text is a conversation of one turn.
    ((alone,),) = model.generate([said[0]["text"]], max_new_tokens=5)
    assert alone["ids"] == written[0][0]["ids"]


def test_candidates_are_ranked_by_their_mean_likelihood(workdir):
    model = bertjax.load(str(workdir))
    prompt = [{"turns": [{"text": "how many is 3 and one ?"}]}]
    drawn = dict(temperature=1.0, seed=3, max_new_tokens=6)
    (every,) = model.generate(prompt, num_return_sequences=8, **drawn)
    (best,) = model.generate(prompt, rank=8, num_return_sequences=2, **drawn)
    order = sorted(every, key=lambda one: -one["score"] / len(one["ids"]))
    assert best == order[:2] and best[0] != every[0]


def test_rows_of_prompts_are_those_of_training(workdir):
    """A prompt has the same row as its conversation in training, roles included."""
    model = bertjax.load(str(workdir))
    rows = dialogues.Conversations(model)
    turns = [("ann", "how many is 3"), ("bob", "that makes 4 ."), ("cem", "and one ?")]
    said = [{"speaker": s, "text": t} for s, t in turns]
    row = rows.lay_out_one({"turns": said, "speaker": "ann"})
    ids = [model.tokenizer.encode(text) for _, text in turns]
    begin, end = model.tokenizer.cls_id, model.tokenizer.sep_id
    wanted = [begin, *(i for own in ids for i in [*own, end]), begin]
    assert row["input_ids"].tolist() == wanted
    roles = [0, *np.repeat([0, 2, 1], [len(own) + 1 for own in ids]), 0]
    roles[0] = 0
    assert row["role_ids"].tolist() == roles
    context = len(wanted) - 1
    target = rows.target
    places = [*range(target + context - 1, target - 1, -1), 0]
    assert row["position_ids"].tolist() == places
    assert row["token_type_ids"].tolist() == [0] * context + [1]
    assert row["attention_steps"].tolist() == [0] * context + [context + 1]
    # By default the answerer is the last speaker other than that of the last turn.
    usual = rows.lay_out_one({"turns": said})
    assert usual["role_ids"][1] == 2 and usual["role_ids"][len(ids[0]) + 2] == 0
    # Names are compared as in training: 1 and "1" are the same.
    said = [{"speaker": s, "text": "how"} for s in ("2", "1", 1)]
    assert rows.lay_out_one({"turns": said})["role_ids"][1] == 0


@pytest.mark.parametrize(
    "prompt, options, said",
    [
        ({"turns": "hello"}, {}, r"is not a conversation: give \{\"turns\""),
        ({"turns": [{"speaker": "a"}]}, {}, "`text` is not a string"),
        ({"turns": []}, {}, "there is no turn"),
        (
            {"turns": [{"text": "a"}, {"speaker": " ", "text": "b"}], "speaker": "ann"},
            {},
            "speaker=ann is to answer, and no turn says whose it is",
        ),
        ({"turns": [{"text": "a"}], "speaker": ["ann"]}, {}, "not text but list"),
        ({"turns": [{"text": "one " * 200}]}, {}, "does not fit into the 64 tokens"),
        ({"turns": [{"text": "a"}]}, {"max_new_tokens": 999}, "answers have 31 tokens"),
        (
            {"turns": [{"text": "a"}]},
            {"rank": 4},
            r"^rank=4 ranks texts that are drawn",
        ),
        ({"turns": [{"text": "a"}]}, {"how": "unmask"}, "answers conversations"),
    ],
)
def test_what_is_no_conversation(workdir, prompt, options, said):
    with pytest.raises(UserError, match=said):
        bertjax.load(str(workdir)).generate([prompt], **options)


@pytest.mark.parametrize(
    "key, said",
    [
        ("data.plan=document", r"data\.plan=turns"),
        ("objective=clm", "rows of turns go with objective=dialogue"),
        ("data.target_length=94", r"data\.target_length=94 must be from 4 to 92"),
        ("data.max_predictions=8", r"data\.max_predictions=8 is less"),
        (
            "data.text_field=words",
            r"turn 1: there is no field `words` \(data.text_field\)",
        ),
        ("model.id_streams=rolle:4", "have no rolle_ids"),
    ],
)
def test_what_is_refused(flags, key, said):
    with pytest.raises(UserError, match=said):
        show.main([*flags, f"--config.{key}"])


def test_what_other_commands_say_of_a_model_of_answers(workdir):
    model = bertjax.load(str(workdir))
    for function in (model.fill_mask, model.score):
        with pytest.raises(UserError, match="was trained to answer conversations"):
            function(["how many is [MASK] ?"])
    with pytest.raises(UserError, match=r"embeds ids .*role:32,turn:32"):
        make_served(model, "the model")


def test_how_different_answers_are(workdir, command, tmp_path):
    given = f"--model={workdir}", "--what=answers", "--json"
    one = json.loads(succeeded(command("evaluate", *given, "--examples=8")).stdout)
    assert one["answers"] == 8 and 0 < one["people_distinct1"] <= 1
    assert 0 <= one["distinct1"] <= 1 and 0 <= one["distinct2"] <= 1
    # Compute people_* by hand, from the last turns of 8 of the 20 conversations.
    text = json.loads((workdir / "config.json").read_text())["data"]["valid"]
    lines = [json.loads(line) for line in Path(text).read_text("utf-8").splitlines()]
    words = [lines[i * 20 // 8]["turns"][-1]["text"].split() for i in range(8)]
    flat = [word for own in words for word in own]
    assert one["people_distinct1"] == pytest.approx(len({*flat}) / len(flat))
    assert one["people_words"] == pytest.approx(len(flat) / 8)
    # --rank samples candidates, from all tokens without --top_k.
    assert evaluate.main([*given[:2], "--examples=2", "--rank=2"]) == 0
    alone = tmp_path / "alone.jsonl"
    alone.write_text('{"turns": [{"speaker": "a", "text": "how many ?"}]}\n')
    refused(command("evaluate", *given, f"--text={alone}"), f"{alone} has no", "turns")


def test_others_answer_no_conversations(trained, command):
    refused(
        command("evaluate", f"--model={trained}", "--what=answers"),
        "answers no conversations", "mlm+nsp",
    )  # fmt: skip
