# SPDX-License-Identifier: Apache-2.0
"""Files of odd text for test_corpora.py, and the documents expected from them."""

import itertools
import json
import re
from typing import NamedTuple

from hypothesis import strategies as st

WORDS = ["the", "cat", "cats", "sat", "on", "Mr", "e.g", "No", "3", "A", "B"]
ATOMS = [
    *WORDS, *(f" {word}" for word in WORDS), ". ", ".", "! ", "?", "…", "。", "」", "។",
    "\n", "\n\n", "\r\n", "\r\n\r\n", "\r", " \n", "\u2028", "\u2029\n", "\x85", "\x0b",
    "\t", "\x00", "\x1f", "\x7f", "\ufeff", "\ufffd", "\xa0", "\u3000", "\u200b",
    "\xad", "e\u0301", "é", "ß", "İ", "ﬁ", "Ω;", "我来到", "한국", "ไทย", "שלום",
    "👩\u200d🚀", "\U0001d11e", "[MASK]", "</s>", "##s", "。" * 9,
    "supercalifragilistic" * 40,
]  # fmt: skip
SENTENCES = [
    "The cats sat. ", "A cat sat on 3! ", "Mr B sat. ", "No. 3, e.g. the cat? ",
    "我来到。", "「我来！」", "The 한국… ", "B (on the cat.) ", "A.\n", "The cat\n\n",
]  # fmt: skip
BROKEN = [b"\xff", b"\xe6\x88", b"\xf0\x9f", b"\xed\xa0\x80", b"\xc0\xaf", b"\xef\xbb"]


class Corpus(NamedTuple):
    """A file, and the expected paragraphs of its documents."""

    name: str
    data: bytes
    documents: list[list[str]]


# What is written, and what is expected.


def repaired(text: str) -> list[str]:
    """Return the repaired lines of a text, by rules written independently."""
    text = text.replace("\ufeff", "")
    text = re.sub("\r\n?", "\n", text)
    text = re.sub("[\u2028\u2029]+\n?", "\n", text)
    text = re.sub("[\ud800-\udfff]", "\ufffd", text)
    text = re.sub("[\t\x0b\x0c\x1c-\x1f\x85]", " ", text)
    text = re.sub("[\x00-\x09\x0b-\x1f\x7f-\x9f]", "", text)
    return [line.strip() for line in text.split("\n")]


def plain(parts: list[bytes]) -> Corpus:
    """Make a file of plain text."""
    data = b"".join(parts)
    documents: list[list[str]] = [[]]
    for line in repaired(data.decode("utf-8", "replace")):
        if line:
            documents[-1].append(line)
        else:
            documents.append([])
    return Corpus("a.txt", data, documents)


def records(texts: list[list[list[str]]], escaped: bool, ends: str) -> Corpus:
    """Make JSON lines; texts of several parts become lists.

    Only escapes can write surrogates.
    """
    lines, documents = [], []
    for parts in texts:
        text = ["".join(a for a in part if escaped or a != "\ud800") for part in parts]
        value = text if len(text) > 1 else "".join(text)
        line = json.dumps({"text": value}, ensure_ascii=escaped)
        lines.append(line.encode())
        found = list(itertools.chain.from_iterable(map(repaired, text)))
        documents.append([line for line in found if line])
    return Corpus("a.jsonl", ends.encode().join(lines), documents)


def numbers(documents: list[list[list[int]]], space: str, is_json: bool) -> Corpus:
    """Make a file of integers."""
    lines = [[space.join(map(str, line)) for line in found] for found in documents]
    told = [[" ".join(line.split()) for line in found] for found in lines]
    told = [[line for line in found if line] for found in told]
    if is_json:
        data = "\n".join(json.dumps({"text": found}) for found in documents)
        return Corpus("a.jsonl", data.encode(), told)
    lines = [[line for line in found if line] for found in lines]  # without blank lines
    data = "\n\n".join("\n".join(found) for found in lines)
    return Corpus("a.txt", data.encode(), told)


atoms = st.one_of(
    st.sampled_from(SENTENCES),
    st.sampled_from(ATOMS),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
)
broken = st.sampled_from(BROKEN) | st.binary(max_size=3)
texts = st.one_of(
    # Without a minimum size most lists are short.
    st.builds(plain, st.lists(atoms.map(str.encode) | broken)),
    st.builds(plain, st.lists(atoms.map(str.encode), min_size=20, max_size=60)),
    st.builds(
        records,
        st.lists(
            st.lists(st.lists(atoms | st.just("\ud800"), max_size=9), max_size=3),
            max_size=6,
        ),
        st.booleans(),
        st.sampled_from(["\n", "\r\n", "\n\n"]),
    ),
)
integers = st.builds(
    numbers,
    st.lists(st.lists(st.lists(st.integers(0, 19), max_size=30), max_size=5)),
    st.sampled_from([" ", "  ", "\t", " \u3000"]),
    st.booleans(),
)
