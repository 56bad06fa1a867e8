# SPDX-License-Identifier: Apache-2.0
"""The report on a corpus: exact if small, close if sampled, bounded in memory."""

import re
import sys
from collections import Counter

import numpy as np
import pytest

from bertjax.data.corpus import duplicates
from bertjax.data.corpus.documents import Document


def words(n, seed):
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("abcdefgh"), 5)) for _ in range(n)]


def shares(lines):
    return [float(p) / 100 for p in re.findall(r"([\d.]+)% of the char", lines[0])]


def test_repeated_lines_are_counted():
    texts = ["See also"] * 9 + ["x" * 30] * 2 + [f"line {i}" for i in range(50)]
    counted = duplicates.RepeatedLines()
    for text in texts:
        counted.add(text, "a.txt")
    lines = counted.report()
    whole = sum(map(len, texts))
    assert shares(lines) == [round((72 + 60) / whole, 4)]
    assert f"would save {(64 + 30) / whole:.2%}" in lines[0] and "estim" not in lines[0]
    assert lines[1:] == [
        "  9 times 'See also' (a.txt)",
        f"  2 times {'x' * 30!r} (a.txt)",
    ]


def test_many_lines_are_sampled(monkeypatch):
    monkeypatch.setattr(duplicates, "FREQUENT", 50)
    rng = np.random.default_rng(0)
    texts = [f"unique line {i}" for i in range(20_000)]
    texts += [f"second line {i}" for i in range(5_000)] * 2 + ["most frequent"] * 3000
    rng.shuffle(texts)
    counted = duplicates.RepeatedLines(capacity=2000)
    for text in texts:
        counted.add(text, "a.txt")
        assert len(counted.lines) <= 2000 and len(counted.frequent) <= 50
    sizes = Counter(texts)
    truth = sum(len(t) * n for t, n in sizes.items() if n > 1) / sum(map(len, texts))
    lines = counted.report()
    assert abs(shares(lines)[0] - truth) < 0.05 and "estimated from" in lines[0]
    assert lines[1] == "  3,000 times 'most frequent' (a.txt)"


def test_near_duplicates():
    pytest.importorskip("datasketch")
    documents = [Document([" ".join(words(200, i))]) for i in range(60)]
    near = documents[7].paragraphs[0].split()
    near[50] = "other"
    far = near[:100] + words(100, 99)
    chinese = "我来到北京清华大学，然后回家了。" * 3 + "天气很好，我们一起去公园玩吧。"
    documents += [Document([" ".join(near).upper()]), Document([" ".join(far)])]
    documents += [Document([chinese]), Document([chinese + "完"]), Document(["."])]
    named = [(f"{i}.txt", d) for i, d in enumerate(documents)]
    lines = duplicates.report_corpus(named)
    assert lines == duplicates.report_corpus(iter(named))
    at = next(i for i, line in enumerate(lines) if "documents:" in line)
    assert (
        f"{2 / 65:.2%} are near-duplicates" in lines[at] and "sample" not in lines[at]
    )
    pairs = [re.findall(r"(\d+)\.txt, document 1,", s) for s in lines[at + 1 :]]
    assert sorted(pairs) == [["62", "63"], ["7", "60"]]


def test_many_copies_are_compared_with_the_first_alone(monkeypatch):
    """With 20,000 copies of a page in a sample this took a quarter of an hour."""
    datasketch = pytest.importorskip("datasketch")
    real, compared = datasketch.MinHash.jaccard, []

    def spy(self, other):
        compared.append(1)
        return real(self, other)

    monkeypatch.setattr(datasketch.MinHash, "jaccard", spy)
    page = Document([" ".join(words(40, 0))])
    lines = duplicates.report_corpus([("a.txt", page)] * 60)
    assert len(compared) == 59
    at = next(i for i, line in enumerate(lines) if "documents:" in line)
    assert f"{59 / 60:.2%} are near-duplicates" in lines[at]
    assert all("100% a.txt, document 1, " in line for line in lines[at + 1 :])


def test_documents_that_begin_alike_are_told_apart():
    pytest.importorskip("datasketch")
    code = Document(["/*", " ".join(words(100, 1)), "*/"])
    other = Document(["/*", " ".join(words(100, 2))])
    documents = [("a.jsonl", code), ("b.jsonl", other), ("b.jsonl", code)]
    assert duplicates.report_corpus(documents)[-1] == (
        "  100% a.jsonl, document 1, '/*' and b.jsonl, document 2, '/*'"
    )


def test_a_sample_keeps_likes_together():
    pytest.importorskip("datasketch")
    compared = duplicates.NearDuplicates(capacity=150)
    for i in range(1500):
        text = words(60, i % 1000)  # the last 500 repeat, with another end
        compared.add(Document([" ".join([*text, str(i)])]), "a.txt")
        assert len(compared.documents) <= 150
    (line,) = [n for n in compared.report() if "documents" in n]
    share = float(re.search(r"([\d.]+)% are", line)[1]) / 100
    n = int(re.search(r"sample of (\d+)", line)[1])
    assert abs(share - 1 / 3) < 4 * (1 / 3 * 2 / 3 / n) ** 0.5 + 0.02


def test_without_datasketch(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    lines = duplicates.report_corpus([("a", Document(["x"]))])
    assert lines[0].startswith("1 line: 0.00%") and "bertjax[dedup]" in lines[-1]
    assert duplicates.report_corpus([])[:-1] == []
