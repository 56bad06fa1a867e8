# SPDX-License-Identifier: Apache-2.0
"""The command bertjax.prepare: shards, merging, its report, and its refusals."""

import pytest

from bertjax import UserError, prepare


@pytest.fixture
def flags(tmp_path) -> list[str]:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "un", "##do", "a", "b"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    (tmp_path / "x.txt").write_text("a undo.\n\nb b b b.\n")
    (tmp_path / "y.txt").write_text("zz.\n\na undo.\n")
    given = {
        "train": f"*={tmp_path}/[xy].txt",
        "valid": f"{tmp_path}/x.txt",
        "vocab": f"{tmp_path}/vocab.txt",
        "cache": f"{tmp_path}/cache",
    }
    values = [f"--config.data.{key}={value}" for key, value in given.items()]
    return ["--config=bert.py:smoke", *values]


def test_shards_and_a_report(flags, tmp_path, capsys):
    for shard in ("1/2", "0/2"):
        assert prepare.main([*flags, f"--shard={shard}"]) == 0
    assert prepare.main([*flags, "--merge=2", "--report"]) == 0
    said = capsys.readouterr()
    assert "shard 1/2: its 1 of 3 pieces are encoded" in said.err
    told = said.out.splitlines()
    lines = [line.split() for line in told]
    assert [line[0] for line in lines[:3]] == ["train/x", "train/y", "valid"]
    assert told[3] == "data.train:"
    assert lines[4] == ["documents", "sentences", "tokens", "share", "unknown"]
    assert lines[5] == ["x", "2", "2", "9", "60.000%", "0.000%"]
    assert lines[6] == ["y", "2", "2", "6", "40.000%", "16.667%"]
    assert lines[7][:4] == ["total", "4", "4", "15"]
    assert told[8].startswith("4 lines: 56.00% of the characters")
    assert told[9] == f"  2 times 'a undo.' ({tmp_path / 'x.txt'})"
    end = told.index("data.valid:")
    assert told[end - 3 : end] == [
        "how the vocabulary fits a sample of the text:",
        "  x: 100.000% of 11 characters known, 1.50 tokens a word (6)",
        "  y: 77.778% of 9 characters known, 2.00 tokens a word (3)",
    ]
    assert (
        told[-1] == "  valid: 100.000% of 11 characters known, 1.50 tokens a word (6)"
    )
    other = [*flags, f"--config.data.cache={tmp_path}/other"]
    assert prepare.main(other) == 0
    whole = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(name, h) for name, _, h in whole] == [(n, h) for n, _, h in lines[:3]]


@pytest.mark.parametrize(
    "wrong",
    ["shard=2/2", "shard=-1/2", "shard=1", "shard=0/0", "merge=0", "merge=x", "merge="],
)
def test_senseless_numbers_are_refused(wrong, flags, tmp_path):
    with pytest.raises(UserError, match=f"--{wrong.split('=')[0]}="):
        prepare.main([*flags, f"--{wrong}"])
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("how", [[], ["--shard=0/2"], ["--merge=2"], ["--report"]])
@pytest.mark.parametrize("task", ["", "task.text=a"])
def test_a_task_is_refused(how, task, flags, tmp_path):
    """A task's table is not running text."""
    own = [f"--config.{task}"] if task else []
    with pytest.raises(UserError, match=r"objective=classify: .*this is a task"):
        prepare.main(["--config=finetune/classify.py", *flags[1:], *own, *how])
    assert not (tmp_path / "cache").exists()


def test_a_table_replaces_no_thesaurus(flags, tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("good fine\n")
    given = f"--similar={file}", f"--synonyms={file}"
    with pytest.raises(UserError, match="is --synonyms, which it would replace"):
        prepare.main([*flags, *given])
    assert file.read_text() == "good fine\n"


def test_one_of_both(flags):
    with pytest.raises(UserError, match="give one of them"):
        prepare.main([*flags, "--shard=0/1", "--merge=1"])
