# SPDX-License-Identifier: Apache-2.0
"""Tagged sentences: how they are read, split into rows, labeled, joined, refused."""

import importlib.resources
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bertjax import UserError
from bertjax.assembly import command_line
from bertjax.checkpoints import best
from bertjax.data.corpus import tfds_source
from bertjax.tasks.prepare_task import make_form
from bertjax.tasks.tag_files import parse_text, read_sentences
from bertjax.tasks.task_rows import Form
from bertjax.tasks.types.tag import METRICS, find_tags, make_tags

SPECIALS = SimpleNamespace(cls_id=1, sep_id=2, pad_id=0)
BOTH = {"task.text": "1", "task.label": "-1"}
FORM = Form(("1",), "-1", ("O", "B-X", "I-X"), 1, METRICS)
SENTENCES = st.lists(
    st.lists(st.tuples(st.text("abc", max_size=9), st.sampled_from(FORM.labels))),
    min_size=1,
    max_size=5,
)


class Letters:
    """A tokenizer of letters; other characters have no piece."""

    vocab_size, unk_id, joins_with_space = 200, 3, False

    def encode_batch(self, texts):
        return [[ord(c) for c in text if c.isalpha()] for text in texts]


def write(folder, text, name="t.bio"):
    (folder / name).write_text(text, "utf-8")
    return str(folder / name)


def read(path, columns=BOTH, say=lambda text: None):
    return read_sentences(path, "data.train", columns, say)


def made(folder, sentences, length, form=FORM):
    lines = [
        json.dumps(dict(zip(("tokens", "tags"), s, strict=True))) for s in sentences
    ]
    found = read(write(folder, "\n".join(lines), "t.jsonl"))
    return make_tags(found, form, Letters(), True).plan(length), found


def test_columns(tmp_path):
    said = []
    text = (
        "-DOCSTART- -X- O\n\nNew NNP B-X\nYork NNP I-X\n\n\n"
        "it\tPRP\tO\r\nNew York\tNNP\tB-X\n"
    )
    found = read(write(tmp_path, text, "t.txt"), BOTH, said.append)
    assert [(s.words, s.tags) for s in found] == [
        (["New", "York"], ["B-X", "I-X"]),
        (["it", "New York"], ["O", "B-X"]),
    ]
    assert [s.place(1).rpartition("/")[2] for s in found] == ["t.txt:4", "t.txt:8"]
    assert "1 line -DOCSTART- skipped" in said[0]
    second = read(f"{tmp_path}/t.txt", {"task.text": "1", "task.label": "2"})
    assert second[0].tags == ["NNP", "NNP"]


def test_other_white_space_than_spaces_is_part_of_a_word(tmp_path):
    text = "10\u00a0000  B-X\n\u3000 O\n\u3000\tO\n"
    (found,) = read(write(tmp_path, text))
    assert found.words == ["10\u00a0000", "\u3000", "\u3000"]
    assert found.tags == ["B-X", "O", "O"]


def test_a_first_sentence_without_words_is_told(tmp_path):
    rows, _ = made(tmp_path, [([], []), (["ab"], ["O"])], 8)
    batch = rows.gather(np.arange(2), None, SPECIALS)
    pieces = [*map(chr, range(200))]
    tokenizer = SimpleNamespace(kind="wordpiece", pieces=pieces, special_ids=[])
    each = ({name: values[i] for name, values in batch.items()} for i in (0, 1))
    told = [
        dict(rows.describe(row, i, tokenizer))["tags"] for i, row in enumerate(each)
    ]
    assert told == ["", "a b/O"]


def test_a_header_and_swapped_columns(tmp_path):
    said = []
    path = write(tmp_path, "word\tpos\n\nAnn\tNOUN\nis\tVERB\n")
    assert len(read(path, say=said.append)) == 2
    assert said == [
        f"{path}:1: looks like names of columns, and is read as a word and its tag: "
        "'word', 'pos'; if so, leave the line out"
    ]
    text = "".join(f"{['NOUN', 'VERB'][i % 2]}\tword{i % 30}\n" for i in range(90))
    with pytest.raises(UserError, match=r"30 tags of 2 different words .*swapped"):
        find_tags(read(write(tmp_path, text)), FORM._replace(labels=()))


def test_what_predict_reads():
    said, words = [], {"task.text": "1"}
    plain = parse_text("Ann  is here\n\nBob\n", "-", words, said.append)
    assert [s.words for s in plain] == [["Ann", "is", "here"], [], ["Bob"]]
    tall = parse_text("Ann\tO\nis\tO\n\nBob\tO\n", "-", words, said.append)
    assert [s.words for s in tall] == [["Ann", "is"], ["Bob"]]
    assert said == ["- is read as a sentence a line", "- is read as a word a line"]
    lines = parse_text('{"tokens": ["a", "b c"]}', "-", words, said.append)
    assert [s.words for s in lines] == [["a", "b c"]] and len(said) == 2


@pytest.mark.parametrize(
    ("name", "text", "columns", "told"),
    [
        ("t.bio", "a O\n\nb X O\n", BOTH, "t.bio:3: the line has 3 columns"),
        ("t.bio", "a\nb\n", BOTH, "t.bio:1: words and tags are one column"),
        ("t.bio", "\na O\n", {**BOTH, "task.label": "3"}, "t.bio:2: task.label=3"),
        ("t.bio", "a O\n", {**BOTH, "task.label": "ner"}, "'ner' is not a number"),
        ("t.bio", "\n\n", BOTH, "there are no sentences"),
        ("t.csv", "a,O\n", BOTH, "t.csv: tags are read from"),
        ("t.jsonl", '{"tokens": ["a"], "tags": []}', BOTH, "t.jsonl:1: 1 word, but 0"),
        (
            "t.jsonl",
            '{"tokens": "a", "tags": []}',
            BOTH,
            "tokens has to be a list of texts",
        ),
        (
            "t.jsonl",
            '\n{"tokens": ["a"], "tags": [null]}',
            BOTH,
            "t.jsonl:2: tags has to be",
        ),
        ("t.jsonl", '{"tokens": []}', BOTH, "task.label='tags'"),
        ("t.bio", "\tO\n \tB-X\n", BOTH, "t.bio: every word is empty"),
        ("t.jsonl", '{"tokens": [], "tags": []}', BOTH, "t.jsonl: every word is empty"),
    ],
)
def test_broken_files(tmp_path, name, text, columns, told):
    with pytest.raises(UserError) as e:
        read(write(tmp_path, text, name), columns)
    assert told in str(e.value)


def test_first_pieces_by_hand(tmp_path):
    rows, _ = made(tmp_path, [(["ab", "c"], ["B-X", "O"]), (["abcde"], ["I-X"])], 6)
    batch = rows.gather(np.array([0, 1]), None, SPECIALS)
    a = ord("a")
    assert batch["input_ids"].tolist() == [
        [1, a, a + 1, a + 2, 2, 0],
        [1, a, a + 1, a + 2, a + 3, 2],
    ]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0], [1] * 6]
    assert batch["labels"].tolist() == [[0, 1, 0, 0, 0, 0], [0, 2, 0, 0, 0, 0]]
    assert batch["label_weights"].tolist() == [[0, 1, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0]]
    assert [*rows.notes()] == ["1 of 2 rows are cut at 6"]
    assert rows.truncated(np.arange(2)).tolist() == [0, 1]


@given(SENTENCES, st.integers(3, 14))
def test_parted_and_joined(tmp_path_factory, drawn, length):
    """Rows contain every word once and in order; outputs are joined by sentence."""
    assume(any(word for sentence in drawn for word, _ in sentence))
    drawn = [([w for w, _ in s], [t for _, t in s]) for s in drawn]
    rows, read = made(tmp_path_factory.mktemp("t"), drawn, length)
    every = np.arange(rows.n)
    batch = rows.gather(every, None, SPECIALS)
    sizes = batch["attention_mask"].sum(1)
    assert sizes.max() <= length and sizes.tolist() == rows.lengths().tolist()
    words = sum(len(w) for w, _ in drawn)
    assert batch["label_weights"].sum() == words == np.diff(rows.rows).sum()
    assert batch["attention_mask"][batch["label_weights"] > 0].all()
    # Only words that are longer than a row are cut.
    pieces = sum(max(len(w), 1) for s, _ in drawn for w in s)
    real = sizes.sum() - 2 * rows.n
    assert pieces == real + rows.truncated(every).sum()
    assert real == sum(min(max(len(w), 1), length - 2) for s, _ in drawn for w in s)
    told = {"tags": batch["labels"], "probability": 0.5 * batch["label_weights"]}
    assert [*rows.answers(told, read)] == [
        {"tokens": w, "tags": t, "scores": [0.5] * len(w)} for w, t in drawn
    ]
    scores = rows.score(told, every)
    entities = any(tag != "O" for _, tags in drawn for tag in tags)
    assert scores["f1"] == entities and scores["accuracy"] == (words > 0)
    begins = {*rows.rows.tolist()} - {*rows.sentences.tolist()}
    assert bool(begins) == any("sentences are longer" in x for x in rows.notes())


def test_entities_of_whole_sentences(tmp_path):
    """An entity that spans two rows counts once, and half of it does not count."""
    rows, _ = made(tmp_path, [(["ab", "ab", "b"], ["B-X", "I-X", "O"])], 5)
    assert rows.n == 2 and rows.rows.tolist() == [0, 1, 3]
    gold = rows.gather(np.arange(2), None, SPECIALS)["labels"]
    assert rows.score({"tags": gold}, np.arange(2))["f1"] == 1
    short = rows.score({"tags": gold[:1]}, np.arange(1))  # incomplete: not scored
    assert short.keys() == {*METRICS} and all(map(math.isnan, short.values()))
    assert best.find_best("eval/valid/f1", [(2, short["f1"]), (4, 0.0)]).step == 4
    other = gold.copy()
    other[1, 1] = 0
    found = rows.score({"tags": other}, np.arange(2))
    assert found == {"f1": 0, "precision": 0, "recall": 0, "accuracy": 2 / 3}


def test_what_is_said(tmp_path):
    said = []
    text = "a\tI-X\n7\tI-X\n\nb\tO\nc\tI-X\n"
    found = read(write(tmp_path, text))
    rows = make_tags(found, FORM, Letters(), True, said.append)
    assert rows.words[1].tolist() == [3]  # unknown
    assert "1 word without a piece" in said[0] and "t.bio:2" in said[0]
    assert "2 tags I- that continue no entity" in said[1] and "t.bio:5" in said[1]


def test_a_space_before_every_word_of_byte_bpe(tmp_path):
    seen = []
    tokenizer = Letters()
    tokenizer.joins_with_space = True
    tokenizer.encode_batch = lambda texts: seen.extend(texts) or [[5]] * len(texts)
    make_tags(read(write(tmp_path, "a\tO\nb\tO\na\tO\n")), FORM, tokenizer, True)
    assert seen == [" a", " b"]


def test_labels(tmp_path):
    form = FORM._replace(labels=())
    text = "a\tI-Y\nb\tB-X\nc\tI-X\nd\tO\ne\tB-Y\n"
    found = read(write(tmp_path, text))
    labels = find_tags(found, form).labels
    assert labels == ("O", "B-X", "I-X", "B-Y", "I-Y")
    for text, told in {
        "a\tO\nb\tNN\n": "t.bio:2: the tag 'NN' is none of O, B-TYPE, I-TYPE",
        "a\tO\nb\tB-X\n\nc\tB-\n": "t.bio:4: the tag 'B-' is none of O, B-TYPE",
        "a\tO\nb\t\n": "t.bio:2: the tag is empty",
        "a\tO\nb\tO\n": "every word has the same tag",
        "".join(f"a\tB-{i}\n" for i in range(30)): "30 tags of 30 words",
    }.items():
        with pytest.raises(UserError, match=told):
            find_tags(read(write(tmp_path, text)), form)
    with pytest.raises(UserError, match=r"^task\.labels: the tag 'I-' is none of O"):
        find_tags(found, form._replace(labels=("O", "I-")))
    plain = form._replace(metrics=("accuracy",))
    found = read(write(tmp_path, "a\tNN\nb\tVB\n\na\tB-X\n"))
    assert find_tags(found, plain).labels == ("NN", "VB", "B-X")
    with pytest.raises(UserError, match=r"t\.bio:4: task\.labels.*'B-X' is unknown"):
        make_tags(found, plain._replace(labels=("NN", "VB")), Letters(), True)


def test_a_table_of_texts_is_no_file_of_words():
    with pytest.raises(UserError, match="-: 1 of 1 words hold spaces"):
        parse_text("a fine meal\tgood\n", "-", BOTH, print)


def test_tags_of_tfds(monkeypatch):
    of_list = SimpleNamespace(int2str=("O", "B-X").__getitem__)
    features = {"tokens": SimpleNamespace(), "ner": SimpleNamespace(feature=of_list)}
    builder = SimpleNamespace(info=SimpleNamespace(features=features))
    rows = [{"tokens": ["é".encode(), b"x"], "ner": [1, 0]}]
    monkeypatch.setattr(tfds_source, "open_split", lambda *told: (builder, "train"))
    monkeypatch.setattr(tfds_source, "read_split", lambda *told: iter(rows))
    columns = {"task.text": "tokens", "task.label": "ner"}
    name = "tfds:conll2003:train"
    (found,) = read_sentences(name, "data.train", columns, print)
    assert (found.words, found.tags) == (["é", "x"], ["B-X", "O"])
    assert found.place(1) == f"{name}[0] (word 2)"


@pytest.mark.slow  # TensorFlow Datasets needs ten seconds to write
def test_conll2003_as_tensorflow_datasets_makes_it(tmp_path, monkeypatch):
    """Run its builder on files in CoNLL's format: features, splits, labels."""
    tfds = pytest.importorskip("tensorflow_datasets")
    # Writing (not reading) needs a backport that not every installation has.
    monkeypatch.setitem(sys.modules, "importlib_resources", importlib.resources)
    lines = "-DOCSTART- -X- -X- O\n\nAnn NNP B-NP B-PER\nLee NNP I-NP I-PER\n"
    for name in ("train", "valid", "test"):
        write(tmp_path, f"{lines}, , O O\n\n", f"{name}.txt")
    fetch = "download_and_extract"
    monkeypatch.setattr(tfds.download.DownloadManager, fetch, lambda *told: tmp_path)
    builder = tfds.builder("conll2003", data_dir=tmp_path, try_gcs=False)
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(try_download_gcs=False)
    )
    tfds.core.add_data_dir(tmp_path)
    made_ = command_line.parse(["--config=finetune/tag.py:task=conll2003"]).config
    form = make_form(made_)
    for source in (made_.data.train, made_.data.valid):
        found = read_sentences(source, "data.train", form.keys(), print)
        words, tags = ["Ann", "Lee", ","], ["B-PER", "I-PER", "O"]
        assert (words, tags) in [(s.words, s.tags) for s in found]
    of_list = builder.info.features["ner"].feature
    assert form.labels == tuple(of_list.names) and len(form.labels) == 9
