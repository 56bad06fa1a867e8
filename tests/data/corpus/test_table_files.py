# SPDX-License-Identifier: Apache-2.0
import csv
import gzip
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax import UserError
from bertjax.data.corpus.line_repair import Counts
from bertjax.data.corpus.sources import parse_sources

CSV = '''\ufeffid,text,lang
1,"One, two.

""Three""",en

2,Four.,de
3,,de
'''


def read(path, limit=1 << 20, **fields):
    counts = Counts()
    (source,) = parse_sources(str(path), "data.train", "train", **fields)
    return [*source.documents(counts, limit)], counts[str(path)]


@pytest.mark.parametrize("name", ["a.csv", "A.CSV", "a.csv.gz"])
def test_a_row_is_a_document(name, tmp_path):
    path = tmp_path / name
    data = CSV.encode()
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    found, counts = read(path, group_field="lang")
    assert [d.paragraphs for d in found] == [["One, two.", '"Three"'], ["Four."]]
    assert [d.group for d in found] == ["en", "de"]
    assert counts["empty_documents"] == 1


def test_in_tsv_a_quote_is_a_quote(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_bytes(b'x\tbody\r\n1\tHe said "no.\r\n\r\n2\tbad \xff byte\r\n')
    found, counts = read(path, text_field="body")
    paragraphs = [d.paragraphs for d in found]
    assert paragraphs == [['He said "no.'], ["bad \ufffd byte"]]
    assert counts["bad_utf8"] == 1


words = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1)


@given(st.lists(st.lists(words, min_size=1, max_size=3), min_size=1), st.integers(1, 9))
def test_what_a_spreadsheet_writes_comes_back(texts, size):
    from bertjax.data.corpus import table_files

    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerows([["n", "text"], *enumerate("\n".join(t) for t in texts)])
    data = out.getvalue().encode()
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_files.files, "unpacked", lambda name: chunks)
        source = table_files.TableSource("a.csv")
        found = [d.paragraphs for d in source.read(Counts(), 1 << 20)]
    assert found == texts


@pytest.mark.parametrize(
    "name, data, message",
    [
        ("a.csv", "a,b\n1,2\n", "a.csv:1: there is no column `text` .data.text_field"),
        (
            "a.csv",
            "text,b\n\nx,1\ny\n",
            "a.csv:4: the row has 1 cell, the first line 2",
        ),
        ("a.csv", 'text\nx\n"y\nz\n', "a.csv:3: is not CSV"),
        ("a.csv", "text,b,text\n1,2,3\n", "a.csv:1: two columns are `text`"),
        ("a.tsv", "b\ttext\n1\n", "a.tsv:2: the row has 1 cell"),
        ("a.csv", 'text\nx\n"' + "y\n" * 60, "a.csv:3: a row of more than 100 bytes"),
        ("a.tsv", "text\nx\n" + "y" * 200, "a.tsv:3: a row of more than 100 bytes"),
    ],
)
def test_what_is_no_table_is_refused(name, data, message, tmp_path):
    path = tmp_path / name
    path.write_text(data)
    with pytest.raises(UserError, match=message):
        read(path, limit=100)


def test_a_table_has_no_streams(tmp_path):
    (tmp_path / "a.csv").write_text(CSV)
    with pytest.raises(UserError, match=r"a\.csv: data\.streams=x is read from JSON"):
        read(tmp_path / "a.csv", streams="x")
