# SPDX-License-Identifier: Apache-2.0
"""Source files of code: found by glob patterns, and as JSON lines."""

import gzip
import json
from collections import Counter

import pytest

from bertjax import UserError
from bertjax.data.corpus.code_files import CodeSource
from bertjax.data.corpus.documents import Fields, refuse_empty
from bertjax.data.corpus.line_repair import Counts
from bertjax.data.corpus.sources import parse_sources

JAVA = "class A {\r\n  int a; // one\n\n  int b = a;\n}\n"
LINES = ["class A {", "int a;", "int b = a;", "}"]
NAMES = [((6, 7, "<class>"),), ((4, 5, "int"),), ((4, 5, "int"), (8, 9, "int")), ()]


def read(sources, limit=1 << 20):
    counts = Counts()
    found = [list(s.documents(counts, limit)) for s in sources]
    return [document for part in found for document in part], counts


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "src/deep").mkdir(parents=True)
    (tmp_path / "src/A.java").write_bytes(JAVA.encode())
    (tmp_path / "src/deep/B.java").write_text("class B { int = }")
    (tmp_path / "src/deep/c.ts").write_text("let c: Foo = 1")
    (tmp_path / "src/notes.txt").write_text("Some notes.")
    (tmp_path / "src/C.java.gz").write_bytes(gzip.compress(b"class C { }"))
    return tmp_path / "src"


def sources(entry, **given):
    return parse_sources(str(entry), "data.train", "train", **given)


def test_a_file_of_code_is_a_document_and_its_lines_are_sentences(folder):
    pytest.importorskip("tree_sitter_java")
    found = sources(f"{folder}/**/*.java*", streams="type")
    assert [type(source) for source in found] == [CodeSource] * 3
    documents, counts = read(found)
    assert documents[0].paragraphs == LINES
    assert [value["type"] for value in documents[0].values] == NAMES
    assert documents[1].paragraphs == ["class C { }"]
    assert counts[f"{folder}/A.java"] == Counter(documents=1, paragraphs=4, crlf=1)
    assert counts[f"{folder}/deep/B.java"]["broken_code"] == 1
    assert any("not all understood" in line for line in counts.lines())
    assert found[0].locate("int b = a;", 1 << 20) == f"{folder}/A.java, line 4"


def test_without_the_stream_lines_stay_whole(folder):
    pytest.importorskip("tree_sitter_java")
    (document,), _ = read(sources(folder / "A.java"))
    assert document.paragraphs == LINES
    assert [*document.values] == [{}] * 4


def test_long_files_are_skipped_and_counted(folder):
    documents, counts = read(sources(folder / "A.java"), limit=10)
    assert not documents and counts[str(folder / "A.java")]["long_code"] == 1
    with pytest.raises(UserError, match="only blanks and 1 file of code over data"):
        refuse_empty(sources(folder / "A.java"), counts)


def test_records_of_other_languages_alone_are_not_called_blank(tmp_path):
    rows = [{"path": f"{name}.py", "text": "x = 1"} for name in "ab"]
    found = sources(records(tmp_path / "a.jsonl", *rows), code_field="path")
    with pytest.raises(UserError, match="and 2 records of a language that is not read"):
        refuse_empty(found, read(found)[1])


def test_other_content_is_another_fingerprint(folder, tmp_path):
    one, other = sources(folder / "A.java")[0], sources(folder / "deep/B.java")[0]
    asked = sources(folder / "A.java", streams="type")[0]
    prints = {s.fingerprint(str(tmp_path / "c")) for s in (one, other, asked)}
    assert len(prints) == 3
    fields = Fields(code_field="path"), Fields(), Fields(streams="type")
    assert len({f.suffix() for f in fields}) == 3 and fields[1].suffix() == ""


def records(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_json_lines_of_code(tmp_path):
    pytest.importorskip("tree_sitter_java")
    path = records(
        tmp_path / "code.jsonl",
        {"content": JAVA, "path": "src/A.java"},
        {"content": "let c: Foo = 1", "path": "TypeScript"},
        {"content": "def f(): pass", "path": "f.py"},
        {"content": "SELECT 1", "path": None},
        {"content": None, "path": "B.java"},
    )
    given = dict(text_field="content", code_field="path", streams="type")
    documents, counts = read(sources(path, **given))
    assert [d.paragraphs for d in documents] == [LINES, ["let c: Foo = 1"]]
    assert documents[1].values[0] == {"type": ((4, 5, "Foo"), (7, 10, "<class>"))}
    assert counts[str(path)]["other_languages"] == 2
    assert counts[str(path)]["empty_documents"] == 1


@pytest.mark.parametrize(
    "row, said",
    [
        ({"text": "class A { }"}, "line 1: there is no field `path`"),
        ({"text": ["a"], "path": "A.java"}, "`text` is not a string but list"),
        ({"text": "a", "path": 3}, "`path` is not a string but int"),
    ],
)
def test_records_that_are_none(tmp_path, row, said):
    path = records(tmp_path / "code.jsonl", row)
    with pytest.raises(UserError, match=said):
        read(sources(path, code_field="path"))


def test_streams_that_code_has_not(folder):
    with pytest.raises(
        UserError, match=r"stream type alone, not data\.streams=speaker"
    ):
        sources(folder / "A.java", streams="speaker")
    with pytest.raises(UserError, match=r"JSON lines or code, and this is no \.jsonl"):
        sources(folder / "notes.txt", streams="type")
    with pytest.raises(UserError, match=r"from JSON lines, and this is no \.jsonl"):
        sources(folder / "notes.txt", layout="turns")
    with pytest.raises(UserError, match="plain text, which has no fields"):
        sources(folder / "A.java", group_field="language")
    with pytest.raises(UserError, match=r"data\.train=.*notes\.txt: code is read from"):
        sources(folder / "notes.txt", streams="type", code_field="path")
