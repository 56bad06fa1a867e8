# SPDX-License-Identifier: Apache-2.0
"""Find what a corpus holds twice: repeated lines, and nearly identical documents.

Both need one pass and bounded memory. Lines are counted exactly; in a large corpus only
those in a part of the space of hashes. Documents are compared by MinHash (Broder 1997,
the library datasketch); in a large corpus only a sample, which keeps similar documents
together.
"""

import hashlib
import heapq
import re
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from bertjax import counted
from bertjax.data.corpus.documents import Document
from bertjax.data.tokenizers.tokenizer import SPACELESS

LINES = 1 << 19  # largest number of distinct lines in memory
FREQUENT = 1000  # the most frequent lines stay, wherever their hashes are
DOCUMENTS = 20_000  # documents to compare
SHINGLE = 5  # words
UNITS = 2_000  # words of a document that are read
NEAR = 0.8  # Jaccard similarity of near-duplicates
EXAMPLES = 5
SHOWN = 60  # characters of an example
SPACE = 1 << 64
_UNIT = re.compile(rf"{SPACELESS.pattern}|\w+")


@dataclass(slots=True)
class Line:
    """A line: its number of characters, first source, beginning, and count."""

    size: int
    source: str
    text: str
    count: int = 0


class RepeatedLines:
    """Counts lines: those with a hash below `limit`, and the most frequent ones."""

    def __init__(self, capacity: int = LINES) -> None:
        self.capacity = capacity
        self.limit = SPACE
        self.lines: dict[int, Line] = {}
        self.frequent: dict[int, Line] = {}
        self.total = self.characters = 0

    def add(self, text: str, source: str) -> None:
        """Count a line."""
        self.total += 1
        self.characters += len(text)
        digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8)
        key = int.from_bytes(digest.digest())
        line = self.frequent.get(key) or self.lines.get(key)
        if line is None:
            if key >= self.limit:
                return
            line = self.lines[key] = Line(len(text), source, text[:SHOWN])
        line.count += 1
        if len(self.lines) <= self.capacity:
            return
        # Move the most frequent lines aside, and halve the space of the others.
        both = self.frequent | self.lines
        most = heapq.nlargest(FREQUENT, both, key=lambda k: (both[k].count, -k))
        self.frequent = {key: both.pop(key) for key in most if both[key].count > 1}
        # Lines that are no longer frequent and whose hashes are too large are dropped.
        self.limit //= 2
        self.lines = {k: line for k, line in both.items() if k < self.limit}

    def report(self) -> list[str]:
        """Return lines that report how much is repeated, and what most often."""
        if not self.total:
            return []
        part = self.limit / SPACE
        seen = [(line, 1.0) for line in self.frequent.values()]
        seen += [(line, 1 / part) for line in self.lines.values()]
        again = [(line, weight) for line, weight in seen if line.count > 1]
        inside = sum(w * line.count * line.size for line, w in again)
        saved = sum(w * (line.count - 1) * line.size for line, w in again)
        whole = max(self.characters, 1)
        estimated = f" (estimated from {part:.2%} of the lines)" if part < 1 else ""
        lines = [
            f"{counted(self.total, 'line')}: {inside / whole:.2%} of the characters "
            f"are in lines that occur more than once; each of them once would save "
            f"{saved / whole:.2%}{estimated}"
        ]
        most = heapq.nsmallest(EXAMPLES, again, key=lambda p: (-p[0].count, p[0].text))
        return lines + [f"  {n.count:,} times {n.text!r} ({n.source})" for n, _ in most]


class Near(NamedTuple):
    """A document to compare others with; `key` is its smallest hash."""

    key: int
    where: str
    text: str
    minhash: Any


class NearDuplicates:
    """Compares documents by MinHash; if there are many, those with the smallest keys.

    The key of a document is the smallest hash of its shingles, so that near-duplicates
    mostly have the same key and are in the sample together.
    """

    def __init__(self, capacity: int = DOCUMENTS) -> None:
        self.capacity = capacity
        self.limit = 1 << 32
        self.documents: list[Near] = []
        self.numbers: Counter[str] = Counter()  # documents of each source

    def add(self, document: Document, source: str) -> None:
        """Add a document, if its key is in the sample."""
        from datasketch import MinHash

        self.numbers[source] += 1
        units: list[str] = []
        for paragraph in document.paragraphs:
            units += _UNIT.findall(paragraph.lower())
            if len(units) >= UNITS:
                break
        shingles = _shingles(units[:UNITS])
        key = min(map(zlib.crc32, shingles), default=0)
        # crc32 of short texts is not uniform enough to select a share of them.
        key = zlib.crc32(hashlib.blake2b(key.to_bytes(4), digest_size=8).digest())
        if key >= self.limit:
            return
        minhash = MinHash(num_perm=128, seed=1)
        minhash.update_batch(shingles)
        where = f"{source}, document {self.numbers[source]:,}"
        text = document.paragraphs[0][:SHOWN]
        self.documents.append(Near(key, where, text, minhash))
        while len(self.documents) > self.capacity and self.limit > 1:
            self.limit //= 2
            self.documents = [near for near in self.documents if near.key < self.limit]

    def report(self) -> list[str]:
        """Return lines that report the share of near-duplicates, with examples."""
        from datasketch import MinHashLSH

        if not self.numbers:
            return []
        index = MinHashLSH(threshold=NEAR, num_perm=128)
        size, total = len(self.documents), self.numbers.total()
        pairs = []
        # Copies are compared with the first one only: if a corpus holds a page 10,000
        # times, comparing all pairs would take minutes.
        seen: set[bytes] = set()
        for at, near in enumerate(self.documents):
            others = (
                (near.minhash.jaccard(self.documents[i].minhash), -i)
                for i in index.query(near.minhash)
            )
            best, first = max(others, default=(0.0, 0))
            if best >= NEAR:
                pairs.append((best, self.documents[-first], near))
            if (digest := near.minhash.digest().tobytes()) not in seen:
                seen.add(digest)
                index.insert(at, near.minhash)
        sampled = "" if size == total else f" (in a sample of {size:,})"
        share = len(pairs) / max(size, 1)
        best_first = sorted(pairs, key=lambda p: -p[0])
        return [
            f"{counted(total, 'document')}: {share:.2%} are near-duplicates of "
            f"one before, by {NEAR:.0%} of their shingles of {SHINGLE} words{sampled}",
            *(
                f"  {alike:.0%} {a.where}, {a.text!r} and {b.where}, {b.text!r}"
                for alike, a, b in best_first[:EXAMPLES]
            ),
        ]


def _shingles(units: list[str]) -> list[bytes]:
    """Return the distinct shingles, ascending; a short document is a single shingle.

    >>> _shingles(["a", "b", "c", "d", "e", "f"])
    [b'a b c d e', b'b c d e f']
    """
    n = max(len(units) - SHINGLE + 1, 1)
    return sorted({" ".join(units[i : i + SHINGLE]).encode() for i in range(n)})


def report_corpus(documents: Iterable[tuple[str, Document]]) -> list[str]:
    """Report what a corpus holds more than once; documents: (source name, document).

    The lines report the share of repeated lines and the most frequent ones, and the
    share of near-duplicate documents and some pairs (this needs datasketch, the extra
    `dedup`). In a large corpus both shares are estimates and are reported as such.

    >>> twice = Document(["See also", "A long line."])
    >>> report_corpus([("a.txt", twice), ("b.txt", twice)])[:2]
    ['4 lines: 100.00% of the characters are in lines that occur more than once; \
each of them once would save 50.00%',
     "  2 times 'A long line.' (a.txt)"]
    """
    lines, near = RepeatedLines(), NearDuplicates()
    try:
        import datasketch
    except ImportError:
        datasketch = None
    for source, document in documents:
        for paragraph in document.paragraphs:
            lines.add(paragraph, source)
        if datasketch:
            near.add(document, source)
    if datasketch:
        return lines.report() + near.report()
    missing = "near-duplicate documents: not counted, pip install 'bertjax[dedup]'"
    return [*lines.report(), missing]
