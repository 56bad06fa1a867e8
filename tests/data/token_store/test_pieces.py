# SPDX-License-Identifier: Apache-2.0
"""Pieces of sources yield the documents of the whole; records with fields."""

import gzip
import json
import pickle
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bertjax import UserError
from bertjax.data.corpus import files, line_files
from bertjax.data.corpus.documents import Document, refuse_empty
from bertjax.data.corpus.line_files import FileSource
from bertjax.data.corpus.line_repair import Counts
from bertjax.data.corpus.parquet import ParquetSource
from bertjax.data.corpus.sources import parse_sources


def parse(path, **fields):
    (source,) = parse_sources(str(path), "data.train", "train", **fields)
    return source


def read(sources, limit=1 << 20):
    counts = Counts()
    found = [d for s in sources for d in s.documents(counts, limit)]
    return found, counts.as_dict()


def both(source, piece_bytes, limit=1 << 20):
    """Read a source as a whole, and in pieces that were pickled."""
    pieces = [pickle.loads(pickle.dumps(p)) for p in source.split(piece_bytes)]
    whole = read([source], limit)
    assert read(pieces, limit) == whole
    return whole[0], pieces


TEXTS = [
    *[b"a", b"bc. ", b"\n", b"\n\n", b"\r", b"\r\n", b"\r\n\r\n", b" ", b"\t", b"\x00"],
    *[b"\xef\xbb\xbf", b"\xe4\xb8\xad", b"\xff", b"\xe3\x80\x80", b"\xe2\x80\xa8"],
    *[b"\n \t\n", b"\n\xe3\x80\x80\n", b"\x0b", b"long-line " * 3],
]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(TEXTS), max_size=30).map(b"".join),
    st.integers(1, 40),
    st.sampled_from([5, 12, 1 << 20]),
    st.sampled_from([3, 16, 1 << 20]),
)
@example(b"a\r\n\r\nb", 4, 1 << 20, 1 << 20)
@example(b"a\n" + b" " * 9 + b"\nb", 6, 5, 3)
@example(b"a\n\nb\n\n" * 9, 7, 1 << 20, 3)
def test_pieces_of_text(tmp_path_factory, data, piece, limit, chunk):
    path = tmp_path_factory.mktemp("t") / "a.txt"
    path.write_bytes(b"first.\n" + data)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(files, "CHUNK", chunk)
        both(parse(path), piece, limit)


WIKITEXT = b""" 
 = One = 
 
 A line . 
 Another = one = 
 
 = = Section = = 
 
 Text . 
 
 = Two ( 2 ) = 
 
 = = = = Deep = = = = 
 
 = not a title = 
 Text . 
"""
HEADINGS = [
    b" = \xc3\x89t\xc3\xa9 = \n",
    b" = T = \n \n",
    b" \n = U = \n \n",
    b" = = S = = \n",
]
HEADINGS += [
    b" = \n",
    b" = = \n",
    b"= V =\n\n",
    b" = W = \r\n \r\n",
    b" = X\x0b = \n \n",
]


@pytest.mark.parametrize("pack", ["", ".gz"])
def test_documents_of_wikitext_begin_at_titles(pack, tmp_path):
    path = tmp_path / f"wiki.tokens{pack}"
    path.write_bytes(gzip.compress(WIKITEXT) if pack else WIKITEXT)
    source = parse(path)
    assert source.fingerprint(tmp_path).startswith(f"wikitext{pack}:")
    documents = both(source, 40)[0]
    assert [(d.paragraphs[0], len(d.paragraphs)) for d in documents] == [
        ("= One =", 5),
        ("= Two ( 2 ) =", 4),
    ]
    # Other corpora have another form: a blank line ends a document.
    for other in (WIKITEXT.replace(b" = One = ", b"= One ="), WIKITEXT[10:]):
        path.write_bytes(gzip.compress(other) if pack else other)
        assert parse(path).fingerprint(tmp_path).startswith(f"text{pack}:")
        assert len(read([parse(path)])[0]) == 7 - (other == WIKITEXT[10:])


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([*HEADINGS, *TEXTS, b" Text . \n"]), max_size=30),
    st.integers(1, 90),
    st.sampled_from([7, 1 << 20]),
)
def test_pieces_of_wikitext(tmp_path_factory, drawn, piece, chunk):
    path = tmp_path_factory.mktemp("t") / "a.txt"
    path.write_bytes(b" \n = First = \n \n Text . \n" + b"".join(drawn))
    with pytest.MonkeyPatch.context() as m:
        m.setattr(files, "CHUNK", chunk)
        both(parse(path), piece)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([*TEXTS, b"x" * 700, b"line.\n" * 99]), max_size=30),
    st.integers(1, 900),
)
@example([b"a"] * 3 + [b"\x80" * 2000], 500)
@example([b"x" * 700] * 2 + ["\u3000".encode(), b"a"], 1)
def test_pieces_of_endless_documents_share_the_text_out(tmp_path_factory, drawn, piece):
    """A long text without blank lines keeps every character once, in order, except that
    white space at a cut ends a paragraph."""
    path = tmp_path_factory.mktemp("t") / "a.txt"
    path.write_bytes(b"first.\n" + b"".join(drawn))

    def characters(sources):
        found = [p for d in read(sources)[0] for p in d.paragraphs]
        return "".join("".join(found).replace("\ufffd", "").split())

    with pytest.MonkeyPatch.context() as m:
        m.setattr(line_files, "SPAN", 600)
        assert characters(parse(path).split(piece)) == characters([parse(path)])


def test_a_file_without_blank_lines_is_read_once_or_so(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"A sentence a line.\n" * 9000)
    monkeypatch.setattr(line_files, "SPAN", 10_000)
    monkeypatch.setattr(files, "CHUNK", 1000)
    taken = Counter()

    def spy(raw, start, end, inner=line_files.byte_range):
        for data in inner(raw, start, end):
            taken["bytes"] += len(data)
            yield data

    monkeypatch.setattr(line_files, "byte_range", spy)
    (source,) = parse_sources(str(path), "data.train", "train")
    found = [read([piece]) for piece in source.split(10_000)]
    size = path.stat().st_size
    assert taken["bytes"] < 4 * size
    lines = [sum(len(d.paragraphs) for d in documents) for documents, _ in found]
    assert sum(lines) == 9000 and max(lines) < 1100
    split = sum(c[str(path)].get("long_documents", 0) for _, c in found)
    assert split == sum(map(bool, lines)) - 1


RECORDS = [
    {"text": "One.\n\nTwo."},
    {"text": " "},
    {"text": "x" * 50},
    {"text": ["a", "b\u2028c"]},
    {"text": None},
]


@given(
    st.lists(st.sampled_from(RECORDS), max_size=12),
    st.sampled_from(["\n", "\r\n", "\n\n"]),
    st.integers(1, 90),
    st.sampled_from([40, 1 << 20]),
    st.booleans(),
)
def test_pieces_of_json_lines(tmp_path_factory, rows, end, piece, limit, ended):
    path = tmp_path_factory.mktemp("t") / "a.jsonl"
    lines = [json.dumps(r, ensure_ascii=False) for r in [{"text": "1"}, *rows]]
    path.write_text(end.join(lines) + end * ended, "utf-8", newline="")
    both(parse(path), piece, limit)


def test_many_pieces_share_the_documents_out(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"".join(b"line %d.\r\n \r\n" % i for i in range(1000)))
    documents, pieces = both(parse(path), 100)
    assert len(documents) == 1000 and len(pieces) == -(-path.stat().st_size // 100)
    sizes = [len(read([p])[0]) for p in pieces]
    assert max(sizes) < 12 and min(sizes[:-1]) > 4
    packed = tmp_path / "b.txt.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert len(both(parse(packed), 100)[1]) == 1


def test_a_blank_piece_is_fine_and_a_blank_source_is_not(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a\n" + "\n" * 50)
    both(parse(path), 10)
    path.write_text("\n" * 50)
    source = parse(path)
    counts = Counts()
    for piece in source.split(10):
        assert not list(piece.documents(counts, 99))
    with pytest.raises(UserError, match=r"a\.txt: holds no document"):
        refuse_empty([source], counts)


def test_a_piece_knows_its_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 20 + "{broken\n" + '{"text": "a"}\n' * 20)
    for piece in parse(path).split(14 * 7 + 3):
        if isinstance(piece, FileSource) and piece.start <= 280 < piece.end:
            with pytest.raises(UserError, match=r"a\.jsonl, line 21: not JSON"):
                read([piece])
        else:
            read([piece])


def write_parquet(path, rows, group=3):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


def test_parquet(tmp_path):
    rows = [
        {"body": f"One {i}.\n\nTwo.", "lang": ["en", "zh"][i % 2], "who": ["Ann", ""]}
        for i in range(20)
    ]
    rows[4]["body"] = None
    path = write_parquet(tmp_path / "a.parquet", rows)
    fields = dict(text_field="body", group_field="lang", entity_field="who")
    source = parse(path, **fields)
    assert isinstance(source, ParquetSource)
    documents, pieces = both(source, 1)
    assert len(pieces) == 7 and len(source.split(1 << 30)) == 1
    sizes = [p.text_bytes() for p in pieces]
    assert sum(sizes) == source.split(1 << 30)[0].text_bytes() > max(sizes)
    assert documents[1] == Document(["One 1.", "Two."], "zh", ("Ann",))
    assert len(documents) == 19
    cache = str(tmp_path / "cache")
    first = source.fingerprint(cache)
    assert first.startswith("parquet") and first != parse(path).fingerprint(cache)
    with pytest.raises(UserError, match=r"no column `text` \(data.text_field\).*`who`"):
        read([parse(path)])
    rows[7]["lang"] = "no\ngood"
    write_parquet(path, rows)
    with pytest.raises(UserError, match=r"a\.parquet, row 8: `lang` is 'no..good'"):
        read(parse(path, **fields).split(1))


def test_a_parquet_file_without_a_row_is_a_piece_without_text(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.ParquetWriter(path, pa.schema([("text", pa.string())])).close()
    documents, pieces = both(parse(path), 1)
    assert not documents and len(pieces) == 1


def test_strings_of_parquet_that_are_no_utf8(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def strings(*values):  # Arrow does not check them
        found = pa.array(values, pa.binary())
        return pa.Array.from_buffers(pa.string(), len(found), found.buffers())

    text = strings(b"a\xff b", "\u4e2d".encode(), None)
    names = pa.ListArray.from_arrays(pa.array([0, 1, 1, 2]), strings(b"\xfe", b"c"))
    groups = strings(b"en", b"en", b"en").dictionary_encode()
    columns = {"text": text, "lang": groups, "who": names}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    source = parse(tmp_path / "a.parquet", group_field="lang", entity_field="who")
    found, counts = read([source])
    assert found == [
        Document(["a\ufffd b"], "en", ("\ufffd",)),
        Document(["\u4e2d"], "en"),
    ]
    assert counts[str(tmp_path / "a.parquet")]["bad_utf8"] == 2


@pytest.mark.parametrize("damage", ["cut", "text", "hole"])
def test_damaged_parquet(damage, tmp_path):
    rows = [{"text": "abc " * i} for i in range(2000)]
    path = write_parquet(tmp_path / "a.parquet", rows, 500)
    data = path.read_bytes()
    middle = len(data) // 2
    hole = data[: middle - 200] + b"\xff" * 400 + data[middle + 200 :]
    path.write_bytes({"cut": data[:-9], "text": b"plain", "hole": hole}[damage])
    with pytest.raises(UserError, match=r"a\.parquet.*damaged"):
        read([parse(path)])


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'bertjax\[parquet\]'"):
        read([parse(tmp_path / "a.parquet")])


def test_fields_of_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    row = {"body": [[3, 1], [4, 1, 5]], "lang": 7, "who": ["A  b", "", "A b"]}
    path.write_text(json.dumps(row))
    fields = dict(text_field="body", group_field="lang", entity_field="who")
    assert read([parse(path, **fields)])[0] == [
        Document(["3 1", "4 1 5"], "7", ("A b",))
    ]
    path.write_text(json.dumps({"text": [1, 2, 3]}))
    assert read([parse(path)])[0] == [Document(["1 2 3"])]
    cache = str(tmp_path)
    kinds = {parse(path, **f).fingerprint(cache) for f in ({}, {"group_field": "g"})}
    assert len(kinds) == 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"title": "x"}, r"no field `text` \(data.text_field\); there are: `title`"),
        ({"text": "x"}, r"no field `lang` \(data.group_field\)"),
        ({"text": "x", "lang": "en"}, r"no field `who` \(data.entity_field\)"),
        ({"text": "x", "lang": "", "who": []}, "`lang` is ''"),
        ({"text": "x", "lang": "a\u2028b", "who": []}, "names of groups"),
        ({"text": "x", "lang": "a" * 101, "who": []}, "1 to 100 printable"),
        ({"text": "x", "lang": None, "who": []}, "`lang` is not a string"),
        ({"text": "x", "lang": "en", "who": "Ann"}, "`who` is not a string nor a list"),
        ({"text": "x", "lang": "en", "who": [1]}, "`who` is not a string but int"),
        ({"text": [1, "a"], "lang": "en", "who": []}, "`text` is not a string"),
        ({"text": [1.5], "lang": "en", "who": []}, "`text` is not a string"),
        ({"text": [[1.5]], "lang": "en", "who": []}, "neither text nor integers"),
        ({"text": True, "lang": "en", "who": []}, "`text` is not a string"),
    ],
)
def test_bad_fields_are_named(row, words, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + json.dumps(row))
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: .*" + words) as caught:
        read([parse(path, group_field="lang", entity_field="who")])
    assert "\n" not in str(caught.value)
