# SPDX-License-Identifier: Apache-2.0
import bz2
import gzip
import importlib.resources
import json
import lzma
import os
import pickle
import subprocess
import sys
import tracemalloc
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bertjax import UserError
from bertjax.data.corpus import files
from bertjax.data.corpus import line_repair as text
from bertjax.data.corpus.documents import Document, refuse_empty
from bertjax.data.corpus.line_repair import Counts
from bertjax.data.corpus.sources import named_sources, parse_sources
from bertjax.data.token_store.cache import open_cache

LIMIT = 1 << 26


def read(path, limit=LIMIT):
    counts = Counts()
    (source,) = parse_sources(str(path), "data.train", "train")
    found = [d.paragraphs for d in source.documents(counts, limit)]
    refuse_empty([source], counts)
    return found, counts


def total(counts):
    return sum(counts.values(), Counter())


def write(path, data):
    if path.suffix == ".gz":
        data = gzip.compress(data)
    if path.suffix == ".zst":
        import zstandard

        data = zstandard.compress(data)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a", "a.txt.gz", "a.zst"])
def test_blank_lines_separate_documents(name, tmp_path):
    data = b" One.\nTwo. \n\n \t\n\nThree.\n"
    docs, counts = read(write(tmp_path / name, data))
    assert docs == [["One.", "Two."], ["Three."]]
    assert (total(counts)["documents"], total(counts)["paragraphs"]) == (2, 3)
    assert counts.lines() == []


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "a.jsonl.zst"])
def test_json_lines(name, tmp_path):
    rows = [
        {"text": "One.\n\nTwo.", "id": 1},
        {"text": " "},
        {"text": "Drei ü\u2028vier"},
    ]
    data = "\n".join(json.dumps(r, ensure_ascii=False) for r in rows).encode()
    docs, counts = read(write(tmp_path / name, b"\xef\xbb\xbf" + data + b"\r\n\n"))
    assert docs == [["One.", "Two."], ["Drei ü", "vier"]]
    assert total(counts)["empty_documents"] == 1 and total(counts)["bom"] == 1


def test_repairs_are_counted(tmp_path):
    data = b"\xef\xbb\xbfa\xff\xfeb \xef\xbf\xbd\x00c\td\r\ne\rf\xe2\x80\xa8g\n\nh\x0bi"
    docs, counts = read(write(tmp_path / "odd.txt", data))
    assert docs == [["a\ufffd\ufffdb \ufffdc d", "e", "f", "g"], ["h i"]]
    name = str(tmp_path / "odd.txt")
    assert counts.as_dict()[name] == {
        "bom": 1,
        "bad_utf8": 2,
        "crlf": 3,
        "control_characters": 2,
        "documents": 2,
        "paragraphs": 5,
    }
    assert len(counts.lines()) == 4 and "UTF-8" in counts.lines()[0]
    again = pickle.loads(pickle.dumps(counts))
    assert again == counts == Counts(json.loads(json.dumps(counts.as_dict())))
    again["another"]["bad_utf8"] += 2
    assert total(again)["bad_utf8"] == 4 and total(again)["documents"] == 2


def test_half_pairs_in_json_are_replaced(tmp_path):
    docs, counts = read(write(tmp_path / "a.jsonl", rb'{"text": "a\ud800b\u0000"}'))
    assert docs == [["a\ufffdb"]]
    assert total(counts)["bad_utf8"] == 1 and total(counts)["control_characters"] == 1


@pytest.mark.parametrize("pack", ["", ".gz"])
def test_what_is_read_is_told_where_nothing_comes_of_it(pack, tmp_path):
    data = b"One.\n" + b"\0" * (3 << 20) + b"\n"
    (source,) = parse_sources(
        str(write(tmp_path / f"a.txt{pack}", data)), "data.train", "train"
    )
    told = []
    counts = Counts(read=told.append)
    assert [d.paragraphs for d in source.documents(counts, LIMIT)] == [["One."]]
    assert len(told) > 3 and sum(told) == pytest.approx(len(data) / 1e6)


def test_a_long_line_of_control_characters_takes_little_memory():
    """Five bytes per character: the line, its text, and the result."""
    data = [b"\x01\x0c" * (1 << 19)] * 4
    counter = text.Counter()
    tracemalloc.start()
    try:
        assert list(text.text_lines(iter(data), LIMIT, counter)) == [""]
        assert tracemalloc.get_traced_memory()[1] < 8 << 22
    finally:
        tracemalloc.stop()
    assert +counter == {"control_characters": 1 << 22}


@pytest.mark.parametrize("chunk", [7, 64, 1 << 20])
def test_long_lines_are_split_not_lost(chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", chunk)
    words = " ".join(f"word{i}é" for i in range(50))
    data = f"short\n{words}\nend\n\n{'ü' * 100}\n".encode()
    docs, counts = read(write(tmp_path / "a.txt", data), limit=64)
    first, second = docs
    assert first[0] == "short" and first[-1] == "end"
    assert " ".join(first[1:-1]) == words
    assert "".join(second) == "ü" * 100
    assert max(len(p.encode()) for d in docs for p in d) <= 64
    assert total(counts)["long_lines"] == 2 and total(counts)["bad_utf8"] == 0


def test_long_json_lines_are_skipped_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 16)
    rows = [json.dumps({"text": t}) for t in ("one", "x" * 200, "two")]
    path = write(tmp_path / "a.jsonl", "\n".join(rows).encode())
    docs, counts = read(path, limit=64)
    assert docs == [["one"], ["two"]] and total(counts)["long_records"] == 1
    with pytest.raises(UserError, match="only blanks and 3 JSON lines over data"):
        read(path, limit=9)
    path.write_text("\n".join([*rows, "{"]))
    with pytest.raises(UserError, match=r"a\.jsonl, line 4"):
        read(path, limit=64)


def test_endless_documents_are_split(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "DOCUMENT_LIMIT", 30)
    docs, counts = read(write(tmp_path / "a.txt", b"ten chars.\n" * 9))
    assert [line for d in docs for line in d] == ["ten chars."] * 9
    assert len(docs) == 3 and total(counts)["long_documents"] == 2


PARTS = [b"a", b" ", b"\n", b"\r", b"\r\n", b"\xe4\xb8\xad", b"\xff", b"\xe4", b"\x00"]


@given(st.lists(st.sampled_from(PARTS), max_size=40), st.integers(1, 9))
@example([b"a", b"\r", b"\n", b"a"], 2)
@example([b"a"] * 8 + [b"\x00", b"\n", b"a"], 1)
def test_chunks_do_not_matter(parts, size):
    data = b"".join(parts)

    def lines(chunks, limit):
        counter = text.Counter()
        return list(text.text_lines(iter(chunks), limit, counter)), +counter

    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    whole = lines([data], LIMIT)
    assert lines(chunks, LIMIT) == whole
    plain = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    plain = plain.decode(errors="replace").replace("\x00", "").split("\n")
    assert whole[0] == [p.strip() for p in plain[: -1 if not plain[-1] else None]]
    # With a small limit, the letters and their documents stay the same.
    short = [
        list(text.group(iter(lines(c, 4)[0]), text.Counter())) for c in ([data], chunks)
    ]
    expected = list(text.group(iter(whole[0]), text.Counter()))
    if b"\xff" not in data and data.decode(errors="ignore").encode() == data:
        for docs in short:
            flat = ["".join(d).replace(" ", "") for d in docs]
            assert flat == ["".join(d).replace(" ", "") for d in expected]
    assert short[0] == short[1]


BAD = {
    "empty.txt": (b"", "empty"),
    "blank.txt": (b"\n\n  \n\n", "no document"),
    "bad.txt.gz": (b"\x1f\x8b\x08\x00garbage", "damaged or truncated"),
    "no.txt.gz": (b"plain text", "damaged or truncated"),
    "cut.txt.gz": (gzip.compress(os.urandom(99_999))[:-9], "damaged or truncated"),
    "bad.jsonl": (b'{"title": "x"}\n', "line 1"),
    "bad2.jsonl": (b'{"text": "a"}\n\n{broken\n', "line 3"),
    "list.json": (b'[\n{"text": "a"}]', "line 1"),
    "number.jsonl": (b'{"text": 3}\n', "line 1.*not a string"),
    "deep.jsonl": (b"[" * 200_000, "line 1"),
    "blank.jsonl": (b'{"text": " "}\n', "no document"),
    "bad.zst": (b"plain text", "damaged"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_by_name(name, tmp_path):
    data, words = BAD[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=f"(?s){name}.*{words}") as err:
        read(tmp_path / name)
    assert "\n" not in str(err.value)


def test_truncated_zstd(tmp_path):
    path = write(tmp_path / "a.zst", os.urandom(99_999).hex().encode())
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"a\.zst: truncated"):
        read(path)


def test_zstd_frames_follow_each_other(tmp_path):
    write(tmp_path / "a.zst", b"one\n")
    write(tmp_path / "b.zst", b"two\n")
    both = tmp_path / "c.zst"
    both.write_bytes((tmp_path / "a.zst").read_bytes() * 2)
    both.write_bytes(both.read_bytes() + (tmp_path / "b.zst").read_bytes())
    assert read(both)[0] == [["one", "one", "two"]]


def test_patterns_and_missing_files(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text("x")
    found = parse_sources(f"{tmp_path}/*.txt, {tmp_path}/c.md", "k", "train")
    assert [os.path.basename(s.name) for s in found] == ["a.txt", "b.txt", "c.md"]
    for value, words in {
        f"{tmp_path}/nosuch.txt": "data.train=.*nosuch.txt: there is no such file",
        f"{tmp_path}/*.gz": "no file matches",
        str(tmp_path): "a directory",
        " , ": "names no text",
        "builtin:doc": "known: builtin:docs",
        "tfds:wiki": "write tfds:",
    }.items():
        with pytest.raises(UserError, match=words):
            parse_sources(value, "data.train", "train")


def test_urls_go_through_epath(tmp_path, monkeypatch):
    from etils import epath

    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(name)

    def opened(url):
        return epath.Path(str(tmp_path) + url.removeprefix("gs://bucket"))

    monkeypatch.setattr(files, "remote", opened)
    (one,) = parse_sources("gs://bucket/a.txt", "k", "train")
    assert [d.paragraphs for d in one.documents(Counts(), 99)] == [["a.txt"]]
    assert one.fingerprint(tmp_path / "cache").startswith("text:")
    assert len(parse_sources("gs://bucket/*.txt", "k", "train")) == 2
    with pytest.raises(UserError, match="no such file"):
        parse_sources("gs://bucket/c.txt", "k", "train")


def test_errors_of_urls_name_them(tmp_path, monkeypatch):
    class Failed(Exception):
        """An error of a cloud library, which is no OSError."""

    class Far:
        length, mtime = 9, 0
        asked = ""

        def __getattr__(self, name):
            def call(*args):
                if name == Far.asked:
                    raise Failed("no token\nand more")
                return 0 if name in ("is_dir", "tell") else self

            return call

    def error(url, asked):
        Far.asked = asked
        with pytest.raises(UserError) as caught:
            for source in parse_sources(url, "data.train", "train"):
                list(source.documents(Counts(), 99))
                source.fingerprint(tmp_path)
        return str(caught.value)

    with pytest.raises(UserError, match=r"data\.train=foo://.* URL: foo://"):
        parse_sources("foo://bucket/a.txt", "data.train", "train")
    monkeypatch.setattr(files, "remote", lambda url: Far())
    for url in ("gs://b/a.txt", "gs://b/a.txt.gz", "gs://b/a.jsonl", "gs://b/a.zst"):
        for asked in ("stat", "is_dir", "open", "read"):
            told = error(url, asked)
            assert url in told and told.endswith("cannot be read (no token)")
    assert "gs://b/*.txt: cannot be read" in error("gs://b/*.txt", "glob")


def test_fingerprints_are_remembered_and_notice_changes(tmp_path, monkeypatch):
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text("one")
    (source,) = parse_sources(str(path), "k", "train")
    first = source.fingerprint(cache)
    monkeypatch.setattr(files, "open_file", None)  # reading would fail
    assert source.fingerprint(cache) == first
    monkeypatch.undo()
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    assert source.fingerprint(cache) != first
    (cache / "fingerprints.json").write_text("{broken")
    path.write_text("one")
    assert source.fingerprint(cache) == first
    other = tmp_path / "a.jsonl"
    other.write_text("one")
    assert parse_sources(str(other), "k", "train")[0].fingerprint(cache) != first
    assert [p.name for p in cache.iterdir()] == ["fingerprints.json"]
    with pytest.raises(UserError, match=r"data\.cache"):
        parse_sources(str(other), "k", "t")[0].fingerprint(path)


def test_what_many_files_need_is_said_once():
    """20,000 code files with other line ends used to print 20,000 lines at a start."""
    three = {f"{i}.java": {"crlf": i + 1, "bad_utf8": i % 2} for i in range(3)}
    assert [line.split(" (")[1] for line in Counts(three).lines()] == [
        "0.java)", "1.java)", "1.java)", "2.java)"
    ]  # fmt: skip
    many = {f"{i}.java": {"crlf": i + 1, "bad_utf8": i == 7} for i in range(1000)}
    ends = "line ends other than \\n, read as \\n"
    assert Counts(many).lines() == [
        "1 byte sequence outside UTF-8, replaced by U+FFFD (7.java)",
        f"500,500 {ends} (0.java, 1.java, 2.java and 997 more)",
    ]


def test_hashes_of_many_files_are_read_and_saved_together(tmp_path, monkeypatch):
    """The table used to be read for each file and written for each new one, so that
    10,000 files took minutes at every start, and 100,000 hours."""
    cache, done = tmp_path / "cache", []
    load, save = files.load_hashes, files.save_hashes
    monkeypatch.setattr(
        files, "load_hashes", lambda *a: done.append("load") or load(*a)
    )
    monkeypatch.setattr(
        files, "save_hashes", lambda *a: done.append("save") or save(*a)
    )
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(f"text {number}")
    sources = parse_sources(f"{tmp_path}/*.txt", "k", "train")

    def fingerprints():
        with open_cache(cache).sharing_hashes():
            return [source.fingerprint(str(cache)) for source in sources]

    first = fingerprints()
    # The table is read once more to merge new hashes with those of other processes.
    assert done == ["load", "save", "load"]
    assert fingerprints() == first and done[3:] == ["load"]
    assert len(files.load_hashes(str(cache))) == 20
    # A slow hash is saved at once, so that later errors cannot lose it.
    monkeypatch.setattr(files, "SAVED", 0.0)
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(f"other {number}")
    (tmp_path / "19.txt").unlink()
    with pytest.raises(UserError, match=r"19\.txt"):
        fingerprints()
    monkeypatch.undo()
    monkeypatch.setattr(files, "open_file", None)  # reading would fail
    sources.pop()
    assert len(fingerprints()) == 19


def test_named_sources():
    assert named_sources("a.txt,b.txt") == {"valid": "a.txt,b.txt"}
    assert named_sources("a.txt", "--text") == {"text": "a.txt"}
    named = named_sources("wiki=a.txt, b.txt,x-1=tfds:w/k:train[:1%],valid=c")
    assert named == {"wiki": "a.txt,b.txt", "x-1": "tfds:w/k:train[:1%]", "valid": "c"}
    assert named_sources("") == {}
    for value in ("a.txt,wiki=b.txt", "a=b,a=c", "a=", "valid=,b=c"):
        with pytest.raises(UserError, match=r"data\.valid"):
            named_sources(value)


def test_every_file_a_component(tmp_path):
    for name in ("zh.txt.gz", "en.txt", "wiki-2.jsonl"):
        (tmp_path / name).write_text("x")
    found = named_sources(f"*={tmp_path}/*", "data.train")
    assert list(found) == ["en", "wiki-2", "zh"]
    assert found["zh"] == str(tmp_path / "zh.txt.gz")
    more = named_sources(f"a=b.txt,*={tmp_path}/e*,{tmp_path}/z*,c=d,e", "data.train")
    assert list(more) == ["a", "en", "zh", "c"] and more["c"] == "d,e"
    assert named_sources("a.txt", "data.train") == {"train": "a.txt"}
    (tmp_path / "en.txt.gz").write_text("x")
    for value in (f"*={tmp_path}/*", f"en=a.txt,*={tmp_path}/en.txt"):
        with pytest.raises(UserError, match=r"data\.train: the name 'en' is given"):
            named_sources(value, "data.train")
    with pytest.raises(UserError, match="no file matches"):
        named_sources(f"*={tmp_path}/*.zst", "data.train")


def test_tfds_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    (source,) = parse_sources("tfds:wiki40b/en:1.3.0:train", "k", "train")
    with pytest.raises(UserError, match=r"tfds:wiki40b.*tensorflow_datasets"):
        source.fingerprint("unused")


@pytest.mark.slow
def test_tfds_on_this_machine(tmp_path, monkeypatch):
    tf = pytest.importorskip("tensorflow")
    tfds = pytest.importorskip("tensorflow_datasets")
    # Writing, unlike reading, needs a back-port that some installations lack.
    monkeypatch.setitem(sys.modules, "importlib_resources", importlib.resources)
    rows = {"text": [f"Line {i}.\n\nNext\tone." for i in range(20)], "n": range(20)}
    tfds.dataset_builders.store_as_tfds_dataset(
        name="tiny",
        version="1.2.3",
        features=tfds.features.FeaturesDict(
            {"text": tfds.features.Text(), "n": np.int64}
        ),
        split_datasets={"train": tf.data.Dataset.from_tensor_slices(rows)},
        data_dir=tmp_path,
    )
    monkeypatch.undo()
    tfds.core.add_data_dir(tmp_path)
    for name in ("tfds:tiny:train[:5]", "tfds:tiny:1.2.3:train[:5]"):
        (source,) = parse_sources(name, "k", "train")
        assert "tiny" in source.fingerprint(tmp_path)
        docs = list(pickle.loads(pickle.dumps(source)).documents(Counts(), LIMIT))
        assert len(docs) == 5 and isinstance(docs[0], Document)
        assert docs[0].paragraphs[1] == "Next one."
        pieces = pickle.loads(pickle.dumps(source.split(1)))
        assert len(pieces) == 5
        found = [list(p.documents(Counts(), LIMIT)) for p in source.split(60)]
        assert list(chain(*found)) == docs and 1 < len(found) < 5
    (source,) = parse_sources("tfds:tiny:train", "k", "train", group_field="n")
    groups = {d.group for d in source.documents(Counts(), LIMIT)}
    assert groups == {str(i) for i in range(20)}
    (source,) = parse_sources("tfds:tiny:train", "k", "train", group_field="m")
    with pytest.raises(UserError, match=r"is no feature `m` .* are: `n`, `text`"):
        source.fingerprint(tmp_path)
    for name in ("tfds:tiny:valid", "tfds:nosuch_data_set:train"):
        (source,) = parse_sources(name, "k", "train")
        with pytest.raises(UserError, match=f"{name}: not on this machine") as caught:
            source.fingerprint(tmp_path)
        assert len(str(caught.value)) < 200
    (source,) = parse_sources("tfds:wikipeda/20230601.en:train", "k", "train")
    with pytest.raises(UserError, match=r"; did you mean 'wikipedia'\?$"):
        source.fingerprint(tmp_path)


@pytest.mark.parametrize(
    "name, head, word",
    [
        ("a.txt.bz2", bz2.compress(b"One."), "bzip2"),
        ("a.txt.bz2", bz2.compress(b""), "bzip2"),
        ("a.txt.xz", lzma.compress(b"One."), "xz"),
        ("a.parq", b"PAR1\x15\x04", "Parquet"),
        ("a.arrow", b"ARROW1\0\0\xff\xff\xff\xff", r"Arrow, .* to_parquet\(\)"),
        ("a.arrow", b"\xff\xff\xff\xffp\0\0\0\x10\0\0\0\0", "Arrow"),
        ("a.tfrecord", b"\x1d\1\0\0\0\0\0\0\xa3\x7fK\t\n", "TFRecord"),
        ("a.txt", b"%PDF-1.7", "PDF"),
        ("a.txt", b"PK\x03\x04", "zip"),
        ("a.txt", "\ufefftext".encode("utf-16-le"), "UTF-16"),
        ("a.jsonl", "\ufefftext".encode("utf-16-be"), "UTF-16"),
        ("a.tar", b"a.txt".ljust(257, b"\0") + b"ustar\0", "a tar archive"),
        ("a.txt", b"\x1f\x8b\x08", r"\*\.gz"),
        ("a.gz", b"\x28\xb5\x2f\xfd", r"\*\.zst"),
    ],
)
def test_files_of_other_kinds_are_refused(tmp_path, name, head, word):
    for path, data in (
        (tmp_path / name, head + b" and more"),
        (tmp_path / f"{name}.gz", gzip.compress(head + b" and more")),
    ):
        if path.name == name or "*" not in word:
            path.write_bytes(data)
            with pytest.raises(UserError, match=f"data.train=.*{path.name}.*{word}"):
                parse_sources(str(path), "data.train", "train")


@pytest.mark.parametrize("begins", ["BZh", "PAR1 is a", "%PDF", "ustar", "7z PK xz"])
def test_words_do_not_make_a_text_foreign(tmp_path, begins):
    for words in begins, begins.rjust(257 + len(begins)):
        (tmp_path / "a.txt").write_text(f"{words} protein.")
        assert parse_sources(str(tmp_path / "a.txt"), "data.train", "train")


def test_names_in_capitals_and_ndjson(tmp_path):
    record = b'{"text": "One."}\n'
    for name in ("a.JSONL", "b.ndjson"):
        (tmp_path / name).write_bytes(record)
    (tmp_path / "c.JSON.GZ").write_bytes(gzip.compress(record))
    for source in parse_sources(str(tmp_path / "*"), "data.train", "train"):
        (document,) = source.documents(Counts(), 1 << 20)
        assert document.paragraphs == ["One."]


def test_plain_text_has_no_fields_and_held_out_needs_no_groups(tmp_path):
    (tmp_path / "a.txt").write_text("One.")
    where = str(tmp_path / "a.txt")
    for field in ("group", "entity"):
        with pytest.raises(UserError, match=f"data.{field}_field=x: .*plain text"):
            parse_sources(where, "data.train", "train", **{f"{field}_field": "x"})
    (source,) = parse_sources(where, "data.valid", "valid", group_field="lang")
    (document,) = source.documents(Counts(), 1 << 20)
    assert document.group == ""


ODD_FILES = """
import os, socket, sys
from bertjax import UserError
from bertjax.data.masking.similar_words import read_similar
from bertjax.data.corpus.files import open_file
from bertjax.data.corpus.sources import named_sources, parse_sources
from bertjax.data.tokenizers.tokenizer import load_tokenizer
from bertjax.data.tokenizers.word_starts import make_segmenter

os.mkfifo("b.txt")
os.mkfifo("m.model")
os.mkdir("c.txt")
socket.socket(socket.AF_UNIX).bind("s.txt")
os.symlink("nowhere", "l.txt")
text = lambda value: parse_sources(value, "data.train", "train")
for call in (
    lambda: text("b.txt"),
    lambda: text("[ab].txt"),
    lambda: text("[ac].txt"),
    lambda: text("[al].txt"),
    lambda: text("s.txt"),
    lambda: text("/dev/zero"),
    lambda: named_sources("*=[ab].txt", "data.train"),
    lambda: load_tokenizer("b.txt"),
    lambda: load_tokenizer("."),
    lambda: load_tokenizer("ids:b.txt"),
    lambda: make_segmenter("jieba:b.txt"),
    lambda: read_similar("b.txt", None),
    lambda: open_file("b.txt"),
):
    try:
        call()
        print("nothing")
    except (UserError, OSError) as error:
        print(error)
print(len(text("**/*.txt")))
"""


def test_what_is_no_regular_file_is_refused_before_it_is_opened(tmp_path):
    """Opening a pipe waits for its writer, forever if there is none."""
    (tmp_path / "a.txt").write_text("One.")
    command = [sys.executable, "-c", ODD_FILES.replace("**/*", "**/a")]
    found = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert not found.stderr
    pipe = "a pipe, not a regular file; write what it gives to a file"
    assert found.stdout.splitlines() == [
        f"data.train=b.txt: {pipe}",
        f"data.train=b.txt: {pipe}",
        "data.train=c.txt: a directory; write c.txt/*.txt",
        "data.train=l.txt: a link to a file that is not there",
        "data.train=s.txt: a socket, not a regular file",
        "data.train=/dev/zero: a device, not a regular file",
        f"data.train=b.txt: {pipe}",
        "data.vocab=b.txt: not a regular file",
        "data.vocab=.: m.model is not a regular file",
        "data.vocab=ids:b.txt: not a regular file",
        "data.segmenter=jieba:b.txt: not a regular file",
        "data.similar=b.txt: not a regular file",
        "[Errno 22] a pipe, not a regular file: 'b.txt'",
        "1",
    ]
