# SPDX-License-Identifier: Apache-2.0
"""Tables: the rows that are read, and the one-line error for each broken table."""

import csv
import gzip
import io
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax import UserError
from bertjax.data.corpus import tfds_source
from bertjax.tasks.tables import parse_rows, read_rows

TEXT = {"task.text": "text"}
CELLS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def rows(text, kind="tsv", columns=TEXT, say=lambda text: None):
    return list(parse_rows(text, kind, "t", columns, say))


def test_a_tsv_has_no_quoting():
    found = rows('text\tlabel\nsay "hi\t1\n"a", \'b\'\t0\r\n')
    assert [r.cells for r in found] == [
        {"text": 'say "hi', "label": "1"},
        {"text": "\"a\", 'b'", "label": "0"},
    ]
    assert [r.place for r in found] == ["t:2", "t:3"]


def test_a_csv_keeps_what_it_quotes():
    found = rows('text,n\n"a, ""b""\nc\td",1\nplain,2\n', "csv")
    assert [r.cells["text"] for r in found] == ['a, "b"\nc\td', "plain"]
    assert [r.place for r in found] == ["t:2", "t:4"]


def test_columns_without_names():
    found = rows("a\t1\nb\t0\n", columns={"task.text": "1", "task.label": "2"})
    assert [r.cells for r in found] == [{"1": "a", "2": "1"}, {"1": "b", "2": "0"}]


BY_NUMBER = {"task.text": "1", "task.label": "2"}
REVIEWS = [("good fun", "pos"), ("no fun", "neg"), ("fun", "pos"), ("dull", "neg")]


@pytest.mark.parametrize(
    ("first", "others", "columns", "named"),
    [
        # A word above numbers, in a column that is read or in another one.
        (("sentence", "label"), [("a b", "0")] * 3, BY_NUMBER, "sentence label"),
        (("review body", "stars", "i"), [("a b", "pos", "7")] * 3, BY_NUMBER, ""),
        # A label that occurs once, while others repeat.
        (("Review", "Verdict"), REVIEWS, BY_NUMBER, "Review Verdict"),
        # Without labels, as for predict: usual names of columns.
        (("sentence", "label"), REVIEWS[:1], {"--columns: TEXT": "1"}, "sentence"),
        (("review_body",), [("good fun",)], {"--columns: TEXT": "1"}, "review_body"),
        (("premise", "hypothesis"), [("a b", "b a")],
         {"--columns: TEXT": "1", "--columns: TEXT_PAIR": "2"}, "premise,hypothesis"),
    ],
)  # fmt: skip
def test_a_header_that_is_read_as_a_row_is_said(first, others, columns, named):
    said = []
    text = "\n".join("\t".join(row) for row in [first, *others])
    found = rows(text, columns=columns, say=said.append)
    assert len(found) == len(others) + 1  # it is only a guess: the line is kept
    (line,) = said
    assert line.startswith("t:1: ") and " | ".join(first) in line
    keys = [key.partition(":")[0] for key in columns]
    if "--columns" in keys:
        assert line.endswith(f"--columns={named}")
    elif named:
        text, label = named.split()
        assert f"--config.task.text={text} --config.task.label={label}" in line
    else:
        assert "--config.task.text='review body'" in line
    said.clear()
    table = "\n".join(map("\t".join, [first, *others]))
    rows(table, columns=dict(zip(columns, first, strict=False)), say=said.append)
    assert not said  # columns given by name need no guess


@pytest.mark.parametrize(
    ("table", "columns"),
    [
        (REVIEWS, BY_NUMBER),
        ([("A fine film that moves.", "mixed"), *REVIEWS], BY_NUMBER),  # a rare class
        ([("gj04", "1", "", "Our friends"), ("gj04", "0", "*", "Who")] * 3,
         {"task.text": "4", "task.label": "2"}),
        ([("A plane", "An air plane", "5.0"), ("A man", "A flute", "3.8")] * 3,
         {"task.text": "1", "task.text_pair": "2", "task.label": "3"}),
        ([("Awful",), ("Dull and long",), ("Fine",)], {"--columns: TEXT": "1"}),
        ([("Good", "pos"), ("Bad", "neg")], BY_NUMBER),
    ],
)  # fmt: skip
def test_rows_that_are_no_header(table, columns):
    said = []
    text = "\n".join("\t".join(row) for row in table)
    assert len(rows(text, columns=columns, say=said.append)) == len(table)
    assert not said


@pytest.mark.parametrize(
    ("header", "kind", "mark"),
    [
        ("text;label", "csv", "';'"),
        ("text\tlabel", "csv", "'\\t'"),
        ("text, b", "tsv", "','"),
    ],
)
def test_another_mark_between_columns_is_told(header, kind, mark):
    with pytest.raises(UserError) as e:
        rows(f"{header}\na\n", kind, columns={"task.text": "text"})
    assert f"{mark} does not separate columns: .csv has commas, .tsv tabs" in str(
        e.value
    )


@pytest.mark.parametrize("kind", ["tsv", "csv"])
def test_an_empty_line_of_one_column_is_an_empty_text(kind):
    said = []
    found = rows("text\na\n\n \nb\n\n\n", kind, say=said.append)
    assert [r.cells["text"] for r in found] == ["a", "", " ", "b"]
    assert [r.place for r in found] == ["t:2", "t:3", "t:4", "t:5"]
    assert len(said) == 1 and said[0].startswith("2 rows") and "t:6, t:7" in said[0]
    assert len(rows("\na\n", kind, {"task.text": "1"})) == 2
    assert len(rows("\ntext\na\n", kind, say=said.append)) == 1
    assert "skipped: t:1" in said[1]


@pytest.mark.parametrize(("kind", "mark"), [("tsv", "\t"), ("csv", ",")])
def test_an_empty_line_of_several_columns_is_skipped_and_said(kind, mark):
    said = []
    text = "\ntext|x\na|1\n\n|\nb|2\n|\n\n".replace("|", mark)
    found = rows(text, kind, say=said.append)
    assert [(r.place, r.cells["text"]) for r in found] == [
        ("t:3", "a"),
        ("t:5", ""),
        ("t:6", "b"),
    ]
    assert "2 rows" in said[0] and "t:7, t:8" in said[0]
    assert "2 empty lines" in said[1] and "t:1, t:4" in said[1]


def test_empty_lines_between_objects_are_said():
    said = []
    assert len(rows('{"text": "a"}\n\n{"text": ""}\n\n', "json", say=said.append)) == 2
    assert said == ["1 empty line, skipped: t:2"]


@given(st.lists(st.tuples(CELLS, CELLS), min_size=1))
def test_csv_round_trip(table):
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows([("text", "x"), *table])
    found = rows(out.getvalue(), "csv")
    while table and not any(cell.strip() for cell in table[-1]):
        table.pop()
    assert [(r.cells["text"], r.cells["x"]) for r in found] == table


@given(st.lists(st.dictionaries(CELLS, CELLS), min_size=1))
def test_json_lines_round_trip(table):
    table = [{**row, "text": "x"} for row in table]
    said = "\n".join(json.dumps(row) for row in table)
    assert [r.cells for r in rows(said, "json")] == table


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("tsv", "text\tlabel\na\t1\nb\t2\t3\n", "t:3: the row has 3 cells"),
        ("tsv", "txt\tlabel\na\t1\n", "did you mean 'txt'"),
        ("tsv", "text\ttext\na\tb\n", "t:1: two columns are 'text'"),
        ("csv", 'text\n"open\n', "t:2: is not CSV"),
        ("json", '{"text": "a"}\n{"text": \n', "t:2: is not JSON"),
        ("json", '{"text": "a"}\n["b"]\n', "t:2: is not a JSON object"),
        ("json", r'{"text": "\ud83d\ude00"}' + '\n{"n": ["\\ud83D"]}', "half a char"),
        ("json", '{"text": "a"}\n\n{"body": "b"}\n', "t:3: task.text='text'"),
    ],
)
def test_broken_tables(kind, text, said):
    with pytest.raises(UserError) as e:
        rows(text, kind)
    assert said in str(e.value)


def test_files(tmp_path):
    (tmp_path / "a.tsv").write_text("text\nx\n")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as f:
        f.write('{"text": "é"}\n')
    found = read_rows(f"{tmp_path}/a.tsv,{tmp_path}/b.jsonl.gz", "data.train", TEXT)
    assert [r.cells["text"] for r in found] == ["x", "é"]
    (tmp_path / "none.tsv").write_text("text\n")
    (tmp_path / "bad.tsv").write_bytes(b"text\nfine\n\xff\xfe\n")
    (tmp_path / "excel.tsv").write_text("text\nfine\n", "utf-16")
    (tmp_path / "half.csv.gz").write_bytes(gzip.compress(b"text\na\n" * 99)[:-9])
    for name, said in {
        "none.tsv": "there are no rows",
        "bad.tsv": "bad.tsv:3: is not UTF-8",
        "excel.tsv": "excel.tsv:1: is UTF-16, and text has to be UTF-8",
        "half.csv.gz": "damaged or truncated",
        "gone.tsv": "there is no such file",
        "a.txt": "there is no such file",
    }.items():
        with pytest.raises(UserError) as e:
            read_rows(f"{tmp_path}/{name}", "data.train", TEXT)
        assert said in str(e.value) and name in str(e.value)


def test_classes_of_tfds_have_names(monkeypatch):
    features = {
        "text": SimpleNamespace(),
        "label": SimpleNamespace(int2str=("no", "yes").__getitem__),
    }
    builder = SimpleNamespace(info=SimpleNamespace(features=features))
    told = [{"text": "é".encode(), "label": 1}, {"text": b"x", "label": -1}]
    monkeypatch.setattr(
        tfds_source, "open_split", lambda name, wanted: (builder, "train")
    )
    monkeypatch.setattr(tfds_source, "read_split", lambda *a: iter(told))
    found = read_rows("tfds:glue/rte:train", "data.train", {"task.text": "text"})
    assert [r.cells for r in found] == [
        {"text": "é", "label": "yes"},
        {"text": "x", "label": ""},
    ]
    assert found[1].place == "tfds:glue/rte:train[1]"
