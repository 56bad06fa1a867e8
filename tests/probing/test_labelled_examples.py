# SPDX-License-Identifier: Apache-2.0
"""Words and spans: their places in rows, their features, and which are used."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from bertjax import UserError
from bertjax.models import encoder
from bertjax.models.config import EncoderConfig
from bertjax.probing import labelled_examples, layer_features, layer_scores
from bertjax.tasks.task_rows import Form

COLUMNS = {"--text": "1", "--tag": "-1"}
FORM = Form(("1",), "-1", (), 1, ("accuracy",))
SPECIALS = SimpleNamespace(cls_id=1, sep_id=2, pad_id=0)
SIZES = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=48,
    initializer_range=0.5,
)
SENTENCES = [
    [("ann", "B-X"), ("bo", "I-X"), ("c", "O")],
    [("de", "O")],
    [("a", "O"), ("abcdef", "B-Y"), ("bo", "B-X"), ("c", "O"), ("ann", "I-X")],
]


class Letters:
    """A tokenizer with one piece per letter, from id 5 on."""

    vocab_size, unk_id, joins_with_space = 40, 3, False
    cls_id, sep_id, pad_id = 1, 2, 0

    def encode_batch(self, texts):
        return [[ord(c) - 92 for c in text] for text in texts]


def silent(text):
    pass


def read(folder, sentences=SENTENCES, most=100, seed=0, form=FORM, say=silent):
    text = "\n\n".join("\n".join("\t".join(w) for w in s) for s in sentences)
    (folder / "a.bio").write_text(text + "\n")
    values = {flag: str(folder / "a.bio") for flag in ("train", "valid")}
    args = SimpleNamespace(**values, max_words=most, seed=seed)
    return labelled_examples.read_words(args, COLUMNS, form, Letters(), say)


def of_targets(folder, rows, most=100, say=silent):
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = {flag: str(folder / "a.jsonl") for flag in ("train", "valid")}
    args = SimpleNamespace(**values, max_words=most, seed=0)
    columns = {"--text": "text", "--targets": "targets"}
    return labelled_examples.read_spans(args, columns, FORM, Letters(), say)


def target(*found, label="r"):
    return {**dict(zip(labelled_examples.NAMES, found, strict=False)), "label": label}


PAIRS = [
    {"text": "ann bo cde", "targets": [target([0, 1], [1, 3]), target([0, 3], [0, 2])]},
    {"text": ["f"], "targets": []},
    {"text": "bo ann", "targets": [target([1, 2], [0, 1], label=7)]},
]


@pytest.mark.parametrize("length", [48, 7])
def test_a_span_lies_where_its_pieces_are(tmp_path, length):
    """In rows of 7 the sentence of 14 pieces is split and its long word truncated."""
    for part in (*read(tmp_path), *of_targets(tmp_path, PAIRS)):
        plan = part.words.plan(length)
        ids = plan.gather(np.arange(plan.n), None, SPECIALS)["input_ids"]
        heads = replace(part, first=True).locate(plan)
        for i, (row, begin, end) in enumerate(zip(*part.locate(plan), strict=True)):
            for k, pieces in enumerate(part.pieces(i)):
                there = ids[row[k], begin[k] : end[k]]
                assert 0 < len(there) <= len(pieces)
                np.testing.assert_array_equal(there, pieces[: len(there)])
                if length == 48:
                    assert len(there) == len(pieces)
                assert [h[i, k] for h in heads] == [row[k], begin[k], begin[k] + 1]


def test_what_does_not_fit_is_said(tmp_path):
    words, pairs = read(tmp_path)[0], of_targets(tmp_path, PAIRS)[0]
    assert words.notes(48) == pairs.notes(48) == []
    parted, cut = words.notes(7)
    assert parted.startswith("2 of 3 sentences are longer") and cut.startswith("1 of")
    assert pairs.notes(7)[-1] == (
        "2 of 3 examples lose words of a span to the next row"
    )


@pytest.fixture(scope="module")
def model():
    cfg = EncoderConfig(**SIZES)
    return cfg, encoder.init(jax.random.key(0), cfg)


def test_features_are_pooled_by_hand(tmp_path, model):
    """Features of a span do not depend on the padding or the batch of its row."""
    cfg, params = model
    reader = layer_features.make_reader(cfg, params, "spans")
    layers = jax.jit(
        lambda batch: encoder.apply_layers(params, cfg, batch, lambda x: x)
    )
    for part in (read(tmp_path)[0], of_targets(tmp_path, PAIRS)[0]):
        plan = part.words.plan(48)
        batch = plan.gather(np.arange(3), None, SPECIALS)
        whole = np.asarray(
            layers({name: batch[name] for name in layer_features.INPUTS})
        )
        for first in (False, True):
            part = replace(part, first=first)
            found = layer_features.read_spans(reader, part, Letters(), cfg, 2)
            assert found.shape == (3, len(part.labels), 16 * part.spans.shape[1])
            wanted = [
                np.concatenate([whole[:, r, a:b].mean(1) for r, a, b in at], -1)
                for at in np.stack(part.locate(plan), -1)
            ]
            wanted = np.stack(wanted, 1)
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_whole_sentences_are_taken_and_it_is_said(tmp_path):
    said = []
    train, valid = read(tmp_path, SENTENCES * 20, 50, say=said.append)
    assert 40 < len(train.labels) <= 50
    # The tags come from all training sentences.
    assert train.form.labels == ("O", "B-X", "I-X", "B-Y")
    there = {tuple(word for word, _ in s) for s in SENTENCES}
    letters = Letters().encode_batch
    allowed = [[i for w in s for i in letters([w])[0]] for s in there]
    words = train.words
    for a, b in zip(words.sentences, words.sentences[1:], strict=False):
        pieces = np.concatenate([words.words[i] for i in range(a, b)]).tolist()
        assert pieces in allowed
    assert said[0].startswith(f"--train: {len(train.labels)} of 180 examples are taken")
    assert said[0].endswith("of 60 sentences: --max_words=50")
    assert sum(line.startswith("--valid: ") for line in said) == 1
    np.testing.assert_array_equal(train.labels, valid.labels)
    sizes = [3, 1, 5] * 20
    draws = []
    for seed in (0, 0, 1):
        args = SimpleNamespace(max_words=50, seed=seed)
        draws.append(labelled_examples.choose(sizes, args, "--train", silent).tolist())
    assert draws[0] == draws[1] != draws[2]
    with pytest.raises(UserError, match="--train: no sentence fits: --max_words=2"):
        few = SimpleNamespace(max_words=2, seed=0)
        labelled_examples.choose([3, 4], few, "--train", silent)


def test_entities_are_scored_as_in_finetuning(tmp_path):
    part = read(tmp_path, form=FORM._replace(metrics=("f1",)))[0]
    score, tags = labelled_examples.entity_f1(part.words), part.words.plan(48)
    assert score(part.labels, part.labels) == 1
    said = np.where(np.arange(9) % 4 == 2, 1, part.labels)
    rows = np.zeros((tags.n, 48), np.int64)
    for r in range(tags.n):
        a, b = tags.rows[r : r + 2]
        rows[r, tags.firsts[a:b]] = said[a:b]
    wanted = tags.score({"tags": rows}, np.arange(tags.n))["f1"]
    assert score(said, part.labels) == wanted and 0 < wanted < 1


def test_equal_words_are_of_one_type(tmp_path):
    """A control task gives equal words the same label."""
    part = read(tmp_path)[0]
    types = layer_scores.text_types([np.concatenate(part.pieces(i)) for i in range(9)])
    names = [word for s in SENTENCES for word, _ in s]
    same = np.array(names)[:, None] == np.array(names)
    np.testing.assert_array_equal(types[:, None] == types, same)


# ---------------------------------------------------------------- targets
def test_targets(tmp_path):
    train, _ = of_targets(tmp_path, PAIRS)
    assert train.form.labels == ("7", "r") and train.labels.tolist() == [1, 1, 0]
    wanted = [[[0, 1], [1, 3]], [[0, 3], [0, 2]], [[5, 6], [4, 5]]]
    assert train.spans.tolist() == wanted
    one = [{"text": "a b", "targets": [target([i, 2], label=i)]} for i in (0, 1)]
    assert of_targets(tmp_path, one)[0].spans.tolist() == [[[0, 2]], [[3, 4]]]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (3, "a.jsonl:1: targets is not a list of objects"),
        ([{"span1": [0, 1]}], "a.jsonl:1, target 1: there is no label"),
        ([{"label": "r"}], "target 1: there is no span1"),
        ([target([1, 1])], r"span1=\[1, 1\] is not a span of 2 words"),
        ([target([0, 1], [1, 3])], r"span2=\[1, 3\] is not a span of 2 words"),
        ([target([0, True])], r"span1 is no \[first word, end\] but \[0, True\]"),
        (
            [target([0, 1], label=["r", "s"])],
            "target 1: the label has to be a label, and",
        ),
        ([target([0, 1], label="")], "target 1: the label is empty"),
        ([target([0, 1])], "--targets=label: every row has the label 'r'"),
        ([target([0, 1]), target([0, 1], [1, 2])], "1: other targets have a second"),
        ([], "--train=.*: there is no span"),
    ],
)
def test_what_is_no_target(tmp_path, found, words):
    with pytest.raises(UserError, match=words):
        of_targets(tmp_path, [{"text": "a b", "targets": found}])


def test_a_text_that_has_no_words(tmp_path):
    with pytest.raises(UserError, match=r"a.jsonl:1: text is not text, nor a list"):
        of_targets(tmp_path, [{"text": 3, "targets": []}])
