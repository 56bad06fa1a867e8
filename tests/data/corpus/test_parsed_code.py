# SPDX-License-Identifier: Apache-2.0
"""Stored parses: found again, also by other processes, and removed at the end."""

import gzip
import json
import subprocess
import sys
from collections import Counter

import pytest

pytest.importorskip("tree_sitter_java")

from bertjax.data.corpus import code_files, code_names, parsed_code
from bertjax.data.corpus.documents import Fields
from bertjax.data.token_store import prepare_data

JAVA = "// Most.\nint max(int a, int b) {{\n  return a{n} > b ? a : b;\n}}\n"
ONE = JAVA.format(n=1)
FIELDS = Fields(code_field="path", streams="type")


@pytest.fixture
def parses(tmp_path):
    path = parsed_code.keep_parses(tmp_path)
    yield path
    parsed_code.forget_parses(path)
    assert not [*tmp_path.glob("*.sqlite*")]


def parse(path, text=ONE, fields=FIELDS):
    counter = Counter()
    document = code_files.parse(text, "java", fields, counter, path)
    return document.paragraphs, [*document.values], counter["broken_code"]


@pytest.mark.parametrize("fields", [FIELDS, FIELDS._replace(streams="")])
@pytest.mark.parametrize("text", [ONE, "int a = ;;; é {", ""])
def test_what_is_found_is_what_was_parsed(parses, monkeypatch, text, fields):
    fresh = parse("", text, fields)
    assert parse(parses, text, fields) == fresh
    monkeypatch.delattr(code_names.Code, "__init__")  # from now on, parsing fails
    assert parse(parses, text, fields) == fresh


def test_a_disk_that_takes_no_database_is_left_alone(tmp_path):
    """Then nothing is stored, and texts are parsed again."""
    (tmp_path / parsed_code.FILE).write_text("no database " * 100)
    assert parsed_code.keep_parses(tmp_path) == ""
    assert not [*tmp_path.iterdir()]


def test_another_process_reads_and_does_not_fill(parses):
    text, other = ONE, JAVA.format(n=2)
    parse(parses, text)
    code = (
        "import sys; from bertjax.data.corpus.parsed_code import *\n"
        "path, text, other = sys.argv[1:]\n"
        "found = find_parse(path, text, 'java', True)\n"
        "keep_parse(path, other, 'java', True, found)\n"
        "print(found.lines[0], find_parse(path, other, 'java', True))\n"
    )
    line = [sys.executable, "-c", code, parses, text, other]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout == "int max(int a, int b) { None\n"


def test_a_file_that_is_gone_is_no_error(parses, tmp_path):
    assert parsed_code.find_parse(str(tmp_path / "x"), "int a;", "java", True) is None


def test_preparation_parses_each_text_once(tmp_path, monkeypatch):
    records = [{"path": "A.java", "text": JAVA.format(n=n)} for n in range(40)]
    file = tmp_path / "code.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, records)).encode()))
    parsed = Counter()
    original = code_names.Code.__init__

    def count(self, text, language):
        parsed[text] += 1
        original(self, text, language)

    monkeypatch.setattr(code_names.Code, "__init__", count)
    prepared = prepare_data.prepare_data(
        train=str(file), valid="", vocab="", tokenizer_kind="byte_bpe", vocab_size=300,
        lower_case=None, cache=str(tmp_path / "cache"), code_field="path",
        streams="type:9", workers=1, say=lambda line: None,
    )  # fmt: skip
    assert len(parsed) == 40 and set(parsed.values()) == {1}
    assert prepared.parts["train"].streams
    assert not [*(tmp_path / "cache").glob("parts-*")]
