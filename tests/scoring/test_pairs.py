# SPDX-License-Identifier: Apache-2.0
"""Minimal pairs by hand, and lines that are not pairs."""

import gzip
import json

import pytest

from bertjax import UserError
from bertjax.scoring.lines import Line, read_lines
from bertjax.scoring.pairs import Pair, compare, read_pairs, table

GOOD = dict(sentence_good="a b", sentence_bad="b a", UID="order")


def pair(uid, field=None):
    about = {"UID": uid} | ({"field": field} if field else {})
    return Pair("a", "b", about)


def test_paradigms_weigh_alike_and_ties_are_half_right():
    pairs = [pair("p", "x"), pair("p", "x"), pair("p", "x"), pair("q", "y")]
    found = compare(pairs, [-1.0, -2.0, -3.0, -1.0], [-2.0, -2.0, -2.0, -5.0])
    assert found["by_paradigm"]["p"] == {"accuracy": 1 / 2, "pairs": 3}
    assert found["accuracy"] == pytest.approx((1 / 2 + 1) / 2)
    assert found["by_field"] == {"x": pytest.approx(1 / 2), "y": 1.0}
    assert "by_term" not in found
    assert (found["ties"], found["pairs"], found["paradigms"]) == (1, 4, 2)
    assert "accuracy_ci95" not in found, "one pair of q"
    told = "\n".join(table(found))
    assert "average over 2 paradigms" in told and "75.0%" in told
    assert "ties, counted as one half: 1" in told
    pairs.append(pair("q"))
    more = compare(pairs, [-1.0, -2.0, -3.0, -1.0, -1.0], [-2.0, -2.0, -2.0, -5.0, 0.0])
    # Variances: 1, 1/2, 0 have (1/4 + 1/4) / 2; 1, 0 have (1/4 + 1/4) / 1.
    half = 1.96 * (1 / 4 / 3 + 1 / 2 / 2) ** 0.5 / 2
    assert more["accuracy_ci95"] == pytest.approx(half)
    assert "±" in table(more)[-2] and "±" not in told
    # Without ties it is the binomial's: p (1 - p) / (n - 1).
    plain = compare([pair("p")] * 4, [-1.0, -1.0, -1.0, -3.0], [-2.0] * 4)
    assert plain["accuracy_ci95"] == pytest.approx(1.96 * (3 / 16 / 3) ** 0.5)
    # A model that cannot distinguish the sentences guesses, and is right half the time.
    assert compare([pair("p")] * 3, [-1.0] * 3, [-1.0] * 3)["accuracy"] == 1 / 2
    right = compare([pair("p")] * 20, [-1.0] * 20, [-2.0] * 20)
    assert right["accuracy"] == 1 and "accuracy_ci95" not in right


def test_pairs_too_long_are_left_out_and_counted():
    found = compare([pair("p"), pair("p")], [-1.0, None], [-2.0, -1.0])
    assert (found["too_long"], found["pairs"], found["accuracy"]) == (1, 1, 1.0)
    assert "too long for the model: 1" in "\n".join(table(found))
    with pytest.raises(UserError, match="each pair"):
        compare([pair("p")], [None], [-1.0])


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "is not JSON"),
        ("[1]", "not a JSON object"),
        (json.dumps(GOOD | {"UID": 3}), "UID is empty or no string"),
        (json.dumps(GOOD | {"sentence_bad": " "}), "sentence_bad is empty"),
        (json.dumps({"sentence_good": "a"}), "sentence_bad is missing"),
        (json.dumps(GOOD | {"sentence_good": "\ud800"}), "not UTF-8"),
    ],
)
def test_lines_that_are_no_pairs(line, words):
    lines = [Line("x.jsonl", 1, json.dumps(GOOD)), Line("x.jsonl", 2, line)]
    with pytest.raises(UserError, match=f"--text=x.jsonl, line 2: .*{words}"):
        read_pairs(lines)


def test_files_of_pairs(tmp_path):
    extra = GOOD | {"field": "syntax", "pairID": "7", "linguistics_term": None}
    text = f"\ufeff{json.dumps(GOOD)}\r\n\n{json.dumps(extra)}\n"
    file = tmp_path / "pairs.jsonl.gz"
    file.write_bytes(gzip.compress(text.encode()))
    pairs, empty = read_pairs(read_lines(str(file)))
    assert empty == 1 and [p.about for p in pairs] == [
        {"UID": "order"},
        {"UID": "order", "field": "syntax"},
    ]
    file.write_bytes(gzip.compress(text.encode())[:-9])
    with pytest.raises(UserError, match="damaged or truncated"):
        list(read_lines(str(file)))
    (tmp_path / "bad.txt").write_bytes(b"fine\n\xff\n")
    with pytest.raises(UserError, match="line 2: not UTF-8"):
        list(read_lines(f"{tmp_path}/*.txt"))
    with pytest.raises(UserError, match="no pair"):
        read_pairs([Line("x", 1, "")])
