# SPDX-License-Identifier: Apache-2.0
"""SQuAD's files, windows, and answers from logits."""

import doctest
import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertjax import UserError
from bertjax.data.tokenizers.tokenizer import load_tokenizer, train_tokenizer
from bertjax.tasks import squad_files
from bertjax.tasks.span_answers import pick_answers, texts
from bertjax.tasks.squad_files import Questions
from bertjax.tasks.squad_metrics import squad_scores
from bertjax.tasks.tables import read_text
from bertjax.tasks.task_rows import Form, Limits
from bertjax.tasks.types.span import parse_text

PIECES = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefgh"), ".", "中"]
TEXTS = [
    "The  café of Zürich — über 3.5 km away — opened in 1889, “early”.",
    "Istanbul İzmir 北京 東京ﬁne ＡＢＣ naïve 👍🏽 ok",
    " leading and trailing\u00a0spaces\t ",
    "धन देने वाले लोग เยอรมนี นี้ cafe\u0301 والأُمَّة",  # marks that lower-casing drops
]


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    path = tmp_path_factory.mktemp("letters") / "vocab.txt"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    path.write_text("\n".join([*special, *PIECES]) + "\n", "utf-8")
    return load_tokenizer(path)


def write(path, paragraphs):
    """Write {context: [(id, question, [(text, start)])]} in SQuAD's format."""
    data = [
        {
            "context": context,
            "qas": [
                {
                    "id": name,
                    "question": question,
                    "is_impossible": not answers,
                    "answers": [dict(text=t, answer_start=s) for t, s in answers],
                }
                for name, question, answers in qas
            ],
        }
        for context, qas in paragraphs.items()
    ]
    text = json.dumps({"version": "2", "data": [{"title": "", "paragraphs": data}]})
    path.write_bytes(
        gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode()
    )
    return path


def test_examples():
    done = doctest.testmod(squad_files)
    assert done.attempted >= 2 and not done.failed


def test_answers_that_are_not_where_the_file_says(tmp_path):
    answers = [("dog", 3), ("a", 5), ("a b", 99), ("a", 0)]
    path = write(
        tmp_path / "f.json.gz",
        {"a b c a b": [("x", "q?", answers), ("y", "?", []), ("z", "?", [("dog", 1)])]},
    )
    (found,) = parse_text(read_text(str(path)), str(path))
    assert [q.span for q in found.questions] == [(6, 7), None, None]
    assert found.golds["y"] == () and found.golds["z"] == ("dog",)
    where = f"{path}: data[0].paragraphs[0].qas[0].answers"
    assert found.moved == [
        f"{where}[1] (question x): 'a' is at 6, not at 5",
        f"{where}[2] (question x): 'a b' is at 6, not at 99",
    ]
    assert len(found.lost) == 2 and found.lost[0].startswith(f"{where}[0] (question x)")


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"data": [\n{]}', ["f.json:2: is not JSON"]),
        ("[]", ["f.json", "data"]),
        ("{}", ["f.json has no 'data'"]),
        ('{"data": []}', ["no questions"]),
        ('{"data": [3]}', ["f.json: data[0] has to be an object"]),
        (
            '{"data": [{"paragraphs": [{"qas": []}]}]}',
            ["paragraphs[0] has no 'context'"],
        ),
        (
            '{"data": [{"paragraphs": [{"context": "c", "qas": '
            '[{"id": "1", "question": "q", "answers": '
            '[{"text": "c", "answer_start": "0"}]}]}]}]}',
            [
                "data[0].paragraphs[0].qas[0].answers[0]: 'answer_start' has to be",
                "'0'",
            ],
        ),
        (
            '{"data": [{"paragraphs": [{"context": "c", "qas": '
            '[{"id": "1", "question": "q"}, {"id": "1", "question": "q"}]}]}]}',
            ["qas[1]", "'1' occurs twice"],
        ),
    ],
)
def test_files_that_are_broken(text, words):
    with pytest.raises(UserError) as caught:
        parse_text(text, "f.json")
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def featurize(asked, tokenizer, length, stride=128, question_length=64, separators=1):
    limits = Limits(stride, question_length)
    form = Form(("question",), "answers", (), separators, (), limits)
    return squad_files.featurize(asked, tokenizer, length, form)


def asked_of(*pairs):
    """Make questions of (context, question, span or None)."""
    return Questions(
        [context for context, _, _ in pairs],
        [
            squad_files.Question(
                str(n), text, n, (c[slice(*span)],) if span else (), span
            )
            for n, (c, text, span) in enumerate(pairs)
        ],
    )


def chars_of(found, row):
    """Return the characters of the pieces of a row's window."""
    return found.chars[found.begin[row] : found.begin[row] + found.size[row]]


def test_rows_by_hand(letters):
    asked = asked_of(("a b c d e f", "q r s", (6, 9)), ("", "z", None))
    found = featurize(asked, letters, 8, stride=2, question_length=2)
    assert found.cut == ["0"] and len(found.question) == 4
    batch = found.gather(np.arange(4), 9, letters)
    rows = [[letters.pieces[i] for i in row if i] for row in batch["input_ids"]]
    assert [" ".join(row) for row in rows] == [
        "[CLS] q r [SEP] a b c [SEP]",
        "[CLS] q r [SEP] c d e [SEP]",
        "[CLS] q r [SEP] e f [SEP]",
        "[CLS] z [SEP] [SEP]",
    ]
    assert batch["attention_mask"].sum(1).tolist() == [8, 8, 7, 4]
    assert batch["token_type_ids"][2].tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0]
    assert batch["start_positions"].tolist() == [0, 5, 0, 0]
    assert batch["end_positions"].tolist() == [0, 6, 0, 0]
    assert found.has_answer.tolist() == [False, True, False, False]
    assert found.question.tolist() == [0, 0, 0, 1]
    assert chars_of(found, 1).tolist() == [[4, 5], [6, 7], [8, 9]]
    # With equally many pieces on the shorter side, the longer row wins, then the first.
    assert found.max_context.tolist() == [1, 1, 1, 0, 1, 1, 0, 1]
    two = featurize(asked, letters, 9, 2, 2, separators=2)
    ids = two.gather(np.arange(1), 9, letters)["input_ids"][0]
    assert ids[3:5].tolist() == [letters.sep_id] * 2 and two.lead[0] == 5


def test_a_question_without_a_right_answer_teaches_nothing(letters):
    asked = asked_of(("a b", "q", (0, 1)), ("a", "q", None))
    asked.questions.append(squad_files.Question("lost", "q", 0, ("z",), None))
    batch = featurize(asked, letters, 9, 2, 2).gather(np.arange(3), 9, letters)
    assert batch["example_weights"].tolist() == [1, 1, 0]


def test_no_room_is_said(letters):
    with pytest.raises(UserError, match=r"data\.length=66 leaves no room"):
        featurize(asked_of(("a", "b", None)), letters, 66)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.integers(8, 20),
    st.integers(1, 12),
)
def test_each_piece_has_its_most_context_in_one_row(letters, sizes, length, stride):
    asked = asked_of(
        *((" ".join("ab"[i % 2] for i in range(n)), "q", None) for n in sizes)
    )
    found = featurize(asked, letters, length, stride, question_length=3)
    assert found.lengths.max() <= length
    each = range(len(found.question))
    words = np.concatenate([chars_of(found, r)[:, 0] // 2 for r in each])
    where = np.repeat(each, found.size)
    for n, size in enumerate(sizes):
        rows = np.flatnonzero(found.question == n)
        chosen = np.isin(where, rows) & found.max_context
        assert sorted(words[chosen]) == list(range(size))
        # The rule of google-research/bert, applied to each piece.
        spans = [words[where == r] for r in rows]
        for piece in range(size):
            score = [
                min(piece - s[0], s[-1] - piece) + 0.01 * len(s) if piece in s else -1
                for s in spans
            ]
            got = where[chosen & (words == piece)]
            assert got.tolist() == [rows[int(np.argmax(score))]]


def test_one_long_context_costs_the_other_questions_nothing():
    short, long = 10**6, 10**6  # short questions; pieces before the last window
    of, begin = np.arange(short + 1), np.append(np.zeros(short, np.int64), long)
    found = squad_files._max_context(of, begin, np.full(short + 1, 2))
    assert found.shape == (2 * (short + 1),) and found.all()


@pytest.mark.parametrize("kind", ["wordpiece", "byte_bpe", "unigram", "bpe"])
def test_answers_come_back_from_their_pieces(kind):
    """Words of odd texts become pieces, and confident logits give the words back."""
    many = [*TEXTS, *(f"{t} {n}" for n in range(30) for t in TEXTS)]
    tokenizer = train_tokenizer(many, kind, 400, lower_case=kind != "byte_bpe")
    asked = Questions(list(TEXTS))
    for n, text in enumerate(TEXTS):
        at = 0
        for word in text.split():
            begin = text.index(word, at)
            at = begin + len(word)
            asked.questions.append(
                squad_files.Question(f"{n}{begin}", "what", n, (word,), (begin, at))
            )
    found = featurize(asked, tokenizer, 40, stride=16, question_length=8)
    rows = np.flatnonzero(found.has_answer)
    assert set(found.question[rows]) == set(range(len(asked.questions)))
    start, end = np.zeros((2, len(found.question), 40), np.float32)
    start[rows, found.start_positions[rows]] = 1
    end[rows, found.end_positions[rows]] = 1
    # An answer at a border is found only in the row in which its start has the most
    # context.
    answers = pick_answers(start, end, found, asked)
    wrong = {
        q.answers[0]: answers[q.id].text
        for q in asked.questions
        if q.answers[0] not in answers[q.id].text
    }
    assert not wrong
    assert answers["30"].text == "धन" and answers["33"].text == "देने"
    exact = [answers[q.id].text == q.answers[0] for q in asked.questions]
    assert np.mean(exact) > (0.8 if kind == "wordpiece" else 0.9)


def test_answers_by_brute_force(letters):
    rng = np.random.default_rng(0)
    words = ["abcdefg"[i] for i in rng.integers(0, 7, 40)]
    asked = asked_of((" ".join(words), "q", None), ("", "q", None), ("a b", "q", None))
    found = featurize(asked, letters, 16, 5, 3)
    # Whole numbers, so that many logits are equal.
    shape = 2, len(found.question), 16
    start, end = rng.integers(0, 6, shape).astype(np.float32)
    for top, longest in ((20, 30), (3, 4), (1, 1)):
        answers = pick_answers(start, end, found, asked, top, longest)
        for n, question in enumerate(asked.questions):
            best, text, null = -np.inf, "", np.inf
            for row in np.flatnonzero(found.question == n):
                null = min(null, start[row, 0] + end[row, 0])
                lead, flat = found.lead[row], found.size[:row].sum()
                pieces = range(lead, lead + found.size[row])
                begins = [i for i in pieces if found.max_context[flat + i - lead]]

                def least(logits, chosen, top=top):
                    return sorted((logits[i] for i in chosen), reverse=True)[:top][-1:]

                for s in begins:
                    for e in pieces:
                        if not s <= e < s + longest:
                            continue
                        if [start[row, s]] < least(start[row], begins):
                            continue
                        if [end[row, e]] < least(end[row], pieces):
                            continue
                        if start[row, s] + end[row, e] > best:
                            best = start[row, s] + end[row, e]
                            chars = chars_of(found, row)
                            a, b = chars[s - lead, 0], chars[e - lead, 1]
                            text = asked.contexts[n][a:b]
            got = answers[question.id]
            assert got == (text, best if best > -np.inf else null, null)


def test_the_threshold_is_tuned(letters):
    asked = asked_of(("a b", "q", (0, 1)), ("a b", "q", None), ("b c", "q", (0, 1)))
    found = featurize(asked, letters, 9, 2, 2)
    start, end = np.zeros((2, 3, 9), np.float32)
    start[:, 3] = end[:, 3] = [3, 1, 2]  # the first piece of the context
    start[:, 0] = [1, 2, 3]
    answers = pick_answers(start, end, found, asked)
    assert [a.doubt for a in answers.values()] == [-5, 0, -1]
    assert texts(answers) == {"0": "a", "1": "a", "2": "b"}
    doubts = {name: a.doubt for name, a in answers.items()}
    scores = squad_scores(texts(answers), asked.golds, doubts)
    threshold = scores["best_f1_thresh"]
    assert threshold == -1
    assert texts(answers, threshold) == {"0": "a", "1": "", "2": "b"}
    with pytest.raises(ValueError, match="3 rows"):
        pick_answers(start[:2], end[:2], found, asked)
