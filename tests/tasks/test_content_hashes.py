# SPDX-License-Identifier: Apache-2.0
"""Content hashes of tasks' rows: a run resumes only if they have not changed.

run.json, sweep.json and checkpoints hold them. Other hashes than these refuse every
finetuning workdir that there is.
"""

import json

import pytest

from bertjax.assembly import command_line, prepared_text
from bertjax.tasks.prepare_task import prepare

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcde'?"]
TABLE = "one\ttwo\tkind\na b\tc\tit's\nd\te a\tno\n"
TAGGED = "a\tB-X\nb\tI-X\nc\tO\n\nd\tO\n"
CHOICES = [{"q": "a b", "of": ["c", "d e"], "right": i} for i in (1, 0)]
PAIRS = [{"query": "a", "positive": "b c", "negatives": ["d", "e"]}]
ASKED = {
    "context": "a b 'c' d é",
    "qas": [
        {
            "id": "one",
            "question": "b c?",
            "answers": [{"text": "'c' d", "answer_start": 4}],
        },
        {"id": "2", "question": "é?", "answers": [], "is_impossible": True},
    ],
}
SQUAD = json.dumps({"data": [{"paragraphs": [ASKED]}]})
TEXTS = ["task.text=one", "task.label=kind"]
PAIR = [*TEXTS, "task.text_pair=two"]
LABELS = [*TEXTS, "task.metrics=f1,accuracy", "task.labels=no,it's"]
LIMITS = ["task.stride=9", "task.answer_length=7"]
CHOOSE = ["task.text=q", "task.choices=of", "task.label=right"]


def lines(rows):
    return "\n".join(map(json.dumps, rows))


@pytest.mark.parametrize(
    ("file", "keys", "name", "text", "expected"),
    [
        ("classify", TEXTS, "t.tsv", TABLE, "2285f621ebf23f66"),
        ("classify", PAIR, "t.tsv", TABLE, "d011e1b1629ba389"),
        ("classify", LABELS, "t.tsv", TABLE, "3aa333e897890330"),
        ("tag", [], "t.tsv", TAGGED, "2cf42c83da5cda07"),
        ("qa", [], "t.json", SQUAD, "1716ed5f9b586b18"),
        ("qa", LIMITS, "t.json", SQUAD, "ddcb5ec61f2bd73e"),
        ("choose", CHOOSE, "t.jsonl", lines(CHOICES), "5ef0f9895f6b0ec7"),
        ("retrieve", [], "t.jsonl", lines(PAIRS), "4edfb5be463c9859"),
    ],
)
def test_they_stay_what_workdirs_hold(tmp_path, file, keys, name, text, expected):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n", "utf-8")
    path = tmp_path / name
    path.write_text(text, "utf-8")
    keys = [*keys, f"data.vocab={tmp_path}/vocab.txt"]
    keys += [f"data.{side}={path}" for side in ("train", "valid")]
    given = [f"--config=finetune/{file}.py:smoke", *(f"--config.{k}" for k in keys)]
    config = command_line.parse(given).config
    hashes = prepared_text.content_hashes(config, prepare(config, print))
    assert {k: v[:16] for k, v in hashes.items()} == dict.fromkeys(
        ("train", "valid"), expected
    )
