# SPDX-License-Identifier: Apache-2.0
"""The output of the command bertjax.show."""

import html
import json

import pytest

from bertjax import UserError, show, train
from bertjax.assembly import command_line


@pytest.fixture
def flags(corpus, vocabulary, tmp_path) -> list[str]:
    given = {
        "train": corpus / "train.txt",
        "valid": "",
        "vocab": vocabulary,
        "cache": tmp_path / "cache",
    }
    values = [f"--config.data.{key}={value}" for key, value in given.items()]
    return ["--config=bert.py:smoke", *values]


def test_rows_and_a_page(flags, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert show.main([*flags, "--examples=2", f"--html={page}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == [
        "step", "gathered", "chosen", "corrupted",
    ]  # fmt: skip
    assert sum(line.startswith("step 0, row ") for line in lines) == 2
    assert lines[-1].startswith("batch_sha256")
    assert "<html" in page.read_text(encoding="utf-8")


def test_similar_words_that_cannot_be_used_are_counted(flags, tmp_path, capsys):
    (tmp_path / "similar.txt").write_text("is are was\nthe a\n")
    similar = f"--config.data.similar={tmp_path / 'similar.txt'}"
    assert show.main([*flags, "--json", "--config.data.masking=macbert", similar]) == 0
    assert "similar.txt: 2 words; left out: none" in capsys.readouterr().err


def test_next_sentences_of_a_single_document_are_named(flags, tmp_path, capsys):
    (tmp_path / "one.txt").write_text("An expression. A statement.\nA name. " * 20)
    one = f"--config.data.train={tmp_path / 'one.txt'}"
    assert show.main([*flags, one, "--json"]) == 0
    assert "train: a single document" in capsys.readouterr().err
    assert show.main([*flags, one, "--json", "--config.objective=mlm+sop"]) == 0
    assert "single document" not in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["--hosts=3", "--html=/no/such/folder/x.html"])
def test_bad_flags(wrong, flags):
    with pytest.raises(UserError, match=wrong.split("=")[0]):
        show.main([*flags, wrong])


# ---------------------------------------------------------------- tasks
WORDS = "good bad film the a Ann lives in Bergen who ? where cat sat ##s .".split()  # noqa: SIM905
SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": "Ann lives in Bergen .",
                    "qas": [
                        {
                            "id": "q",
                            "question": "who lives ?",
                            "answers": [{"text": "Ann", "answer_start": 0}],
                        }
                    ],
                }
            ]
        }
    ]
}
CASES = {
    "classify": (
        "rows.tsv",
        "x\ty\tz\n" + "good film\tthe cats .\tyes\n" * 3 + "bad\tcat\tno\n",
        ["task.text=x", "task.text_pair=y", "task.label=z"],
        {"text": "[CLS] bad [SEP]", "text_pair": "cat [SEP]", "label": "no"},
        {"labels": {"no": 1, "yes": 3}},
    ),
    "regress": (
        "rows.tsv",
        "x\tz\n" + "good\t2.5\n" * 3 + "bad\t0.5\n",
        ["task.text=x", "task.label=z"],
        {"text": "[CLS] bad [SEP]", "score": "0.5"},
        {"scores": {"min": 0.5, "mean": 2.0, "max": 2.5}},
    ),
    "tag": (
        "rows.bio",
        "Ann\tB-PER\nlives\tO\n\ncats\tO\nin\tO\nBergen\tB-LOC\n",
        [],
        {"text": "[CLS] cats in Bergen [SEP]", "tags": "cats/O in/O Bergen/B-LOC"},
        {"tags": {"O": 3, "B-LOC": 1, "B-PER": 1}},
    ),
    "span": (
        "rows.json",
        json.dumps(SQUAD),
        [],
        {
            "question": "[CLS] who lives ? [SEP]",
            "context": "Ann lives in Bergen . [SEP]",
            "answer": "Ann (tokens 5 to 5)",
        },
        {"questions": {"answered": 1}},
    ),
    "choose": (
        "rows.jsonl",
        '{"x": "Ann", "ends": ["lives .", "sat ."], "z": 1}\n',
        ["task.text=x", "task.choices=ends", "task.label=z"],
        {
            "choice 0": "[CLS] Ann [SEP] lives . [SEP]",
            "choice 1 (right)": "[CLS] Ann [SEP] sat . [SEP]",
        },
        {"labels": {"0": 0, "1": 1}},
    ),
    "retrieve": (
        "rows.jsonl",
        '{"query": "who ?", "positive": "Ann .", "negatives": ["a cat"]}\n',
        [],
        {
            "query": "[CLS] who ? [SEP]",
            "passage": "[CLS] Ann . [SEP]",
            "negative": "[CLS] a cat [SEP]",
        },
        {
            "texts": {
                "queries": 1,
                "answers": 1,
                "passages": 2,
                "given negatives": 1,
            }
        },
    ),
}
RECIPES = {"regress": "classify", "span": "qa", "retrieve": "retrieve"}


@pytest.fixture
def task(tmp_path):
    def write(objective: str) -> list[str]:
        name, text, keys, *_ = CASES[objective]
        (tmp_path / name).write_text(text)
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
        (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
        given = [
            f"data.train={tmp_path / name}",
            f"data.vocab={tmp_path / 'vocab.txt'}",
            f"objective={objective}",
            "batch_size=8",
            "data.length=32",
            *(["task.question_length=8"] if objective == "span" else []),
            *keys,
        ]
        recipe = RECIPES.get(objective, objective)
        return [
            f"--config=finetune/{recipe}.py:smoke",
            *(f"--config.{value}" for value in given),
        ]

    return write


@pytest.mark.parametrize("objective", CASES)
def test_rows_of_a_task(objective, task, tmp_path, capsys):
    """Rows show their texts and the answer; the summary counts the labels."""
    *_, wanted, counts = CASES[objective]
    given = task(objective)
    page = tmp_path / "page.html"
    assert show.main([*given, "--json", "--examples=8", f"--html={page}"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    rows = [{k: v for k, v in row.items() if k != "row"} for row in found["examples"]]
    assert wanted in rows
    summary = found["sets"]["train"]
    assert {k: summary[k] for k in counts} == counts
    assert summary["truncated_rows"] == 0 and summary["length"] >= 16
    assert summary["row_tokens"]["max"] >= summary["row_tokens"]["p90"] >= 3
    assert len(found["batch_sha256"]) == 1 and "mask_rate" not in found
    assert [*wanted.values()][-1] in html.unescape(page.read_text(encoding="utf-8"))
    # One line reports the file, with its first row.
    (line,) = (x for x in told.err.splitlines() if "; the first: " in x)
    assert f"; the first: {next(iter(wanted))} [CLS] " in line
    assert (" of text=" in line) == (objective != "retrieve")
    # Without --json it prints the same as text.
    assert show.main([*given, "--examples=8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not any(line.split()[0] in ("gathered", "corrupted") for line in lines)
    for name, text in wanted.items():
        width = max(9, *map(len, wanted))
        assert f"  {name:{width}} {text}" in lines
    assert "0 of them cut (0.0%)" in "\n".join(lines)


def test_a_dry_run_tells_the_first_row(task, capsys):
    assert (
        train.train(
            command_line.parse(task("classify"), train.FLAGS).config,
            None,
            dry_run=True,
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "  label     " in out and "labels no (1), yes (3)" in out


def test_cut_rows_are_counted(task, capsys):
    given = [*task("classify"), "--config.data.length=8", "--examples=8"]
    assert show.main(given) == 0
    out = capsys.readouterr().out
    assert "train: 4 rows, 3 of them cut (75.0%)" in out and ", cut by 1 token\n" in out
