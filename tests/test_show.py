# SPDX-License-Identifier: Apache-2.0
"""The command bertjax.show: what it prints, and where."""

import pytest

from bertjax import UserError, show


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
