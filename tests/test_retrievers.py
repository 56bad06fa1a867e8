# SPDX-License-Identifier: Apache-2.0
"""Retrievers of each kind: trained, searched, reranked, mined, opened elsewhere."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import read_rows
from test_retrieving import WORDS, folder  # noqa: F401

from bertjax import UserError, convert, embed, evaluate, predict, train
from bertjax.inference import embed_file, embed_texts
from bertjax.interop import sentence_transformers
from bertjax.interop.sentence_transformers import Sentences
from bertjax.tasks.hard_negatives import choose_negatives

KINDS = ("retrieve", "splade", "colbert", "rerank")


# ---------------------------------------------------------------- files of others
@pytest.mark.parametrize("kind", ["sparse", "multi_vector"])
def test_files_say_the_kind_and_are_read_again(kind, tmp_path):
    active = 32 * (kind == "sparse")
    made = Sentences(
        kind=kind, dot=True, longest=24, normalize=kind != "sparse", active=active
    )
    draw = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    sentence_transformers.write(tmp_path, made, 6, 32, draw)
    options = json.loads((tmp_path / "config_sentence_transformers.json").read_text())
    assert options["model_type"] == sentence_transformers.CLASSES[kind]
    read = sentence_transformers.read(tmp_path, "--model=x")
    assert (read.kind, read.dot, read.longest, read.active) == (kind, True, 24, active)
    if kind == "multi_vector":
        again = sentence_transformers.read_projection(tmp_path, "x")
        np.testing.assert_array_equal(again, draw)
        config = tmp_path / "2_MultiVectorMask/config.json"
        config.write_text(json.dumps({"skiplist_words": ["."]}))
        # A skip list of tokens and another query length are not supported.
        assert sentence_transformers.read(tmp_path, "--model=x").kind == "dense"
        config.write_text("{}")
        assert sentence_transformers.read(tmp_path, "--model=x").kind == kind
        limits = tmp_path / "sentence_bert_config.json"
        limits.write_text(json.dumps({"query_length": 32}))
        assert sentence_transformers.read(tmp_path, "--model=x").kind == "dense"


def test_a_projection_is_converted_with_its_model(trained, tmp_path, capsys):
    hf, lines, out = tmp_path / "hf", tmp_path / "lines.txt", tmp_path / "v.npz"
    lines.write_text("what is a list ?\nthe value\n")
    convert.main([f"--from={trained}", f"--to={hf}", "--format=hf"])
    draw = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    made = Sentences(kind="multi_vector", dot=True, normalize=True)
    sentence_transformers.write(hf, made, 32, 24, draw)

    def vectors(model):
        embed.main([f"--model={model}", f"--text={lines}", f"--out={out}"])
        return np.load(out)["tokens"]

    wanted = vectors(hf)
    for name, form in (("ours", "bertjax"), ("theirs", "hf")):
        convert.main([f"--from={hf}", f"--to={tmp_path / name}", f"--format={form}"])
        np.testing.assert_allclose(vectors(tmp_path / name), wanted, atol=1e-6)
    (file,) = hf.glob("1_Dense/*.safetensors")
    file.write_bytes(b"abc")
    with pytest.raises(UserError, match=r"hf: 1_Dense: model.safetensors is cut short"):
        vectors(hf)
    file.unlink()
    with pytest.raises(UserError, match=r"hf: 1_Dense holds no model.safetensors"):
        vectors(hf)


# ---------------------------------------------------------------- hard negatives
def test_hard_negatives_are_wrong_and_below_what_is_right():
    texts = ["a", "b", "c", "a", "e", "f"]
    found = np.array([[0, 3, 1, 2, 4], [4, 5, 2, -1, -1], [1, 0, 2, 5, 4]])
    scores = np.array([[1, 1, 0.97, 0.9, 0.5], [3, 2, 1, -9, -9], [-1, -2, -3, -4, -5]])
    grades = [{0: 1, 2: 0}, {1: 1}, {0: 2, 1: 1}]
    assert choose_negatives(found, scores, grades, texts, 2, 0.05) == [
        [2, 4],  # not 3, the answer's text, nor 1, scored nearly as high
        [4, 5],  # the answer is not found, so there is no bound
        [2, 5],  # scores below 0
    ]


# ---------------------------------------------------------------- files of lines
class FakeModel:
    """A model whose vectors contain their line's number; it dies at the line "die"."""

    how, meta, digest = Sentences(pooling="mean", longest=16), {"step": 3}, "abc"

    def __init__(self, dtype="float32"):
        self.seen = []
        self.config = SimpleNamespace(dtype=dtype)

    def embed(self, lines, batch_size):
        if "die" in lines:
            raise KeyboardInterrupt
        self.seen += lines
        return np.array([[len(x), float(x or 0)] for x in lines], np.float32), 1


def test_a_file_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(embed_file, "BLOCK", 4)
    text, out = tmp_path / "lines.txt", tmp_path / "v.npy"
    lines = [*map(str, range(10))]
    text.write_text("\n".join(lines) + "\n")
    model, said = FakeModel(), []
    dying = FakeModel()
    dying.embed = lambda block, n: (
        model.embed(["die"], n) if "8" in block else FakeModel.embed(dying, block, n)
    )
    with pytest.raises(KeyboardInterrupt):
        embed_file.embed_file(dying, str(text), out, 8)
    assert not out.exists() and dying.seen == lines[:8]
    shape, cut, empty = embed_file.embed_file(model, str(text), out, 8, say=said.append)
    assert model.seen == lines[8:] and "8 of 10 lines were embedded before" in said[0]
    assert (shape, cut, empty) == ((10, 2), 3, 0)
    assert np.load(out)[:, 1].tolist() == [*range(10)]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    # Another dtype or another text starts over.
    with pytest.raises(KeyboardInterrupt):
        embed_file.embed_file(dying, str(text), tmp_path / "u.npy", 8)
    other = FakeModel("bfloat16")
    embed_file.embed_file(other, str(text), tmp_path / "u.npy", 8)
    assert other.seen == lines
    with pytest.raises(KeyboardInterrupt):
        embed_file.embed_file(dying, str(text), tmp_path / "w.npy", 8)
    text.write_text("\n".join(reversed(lines)))
    model.seen = []
    embed_file.embed_file(model, str(text), tmp_path / "w.npy", 8)
    assert model.seen == lines[::-1]
    # A process that dies while it makes its draft file leaves no old draft's facts.
    text.write_text("\n".join(lines))
    with pytest.raises(KeyboardInterrupt):
        embed_file.embed_file(dying, str(text), tmp_path / "x.npy", 8)
    other.embed = lambda block, n: (np.zeros((3, 2), np.float32), 0)
    with pytest.raises(ValueError, match="broadcast"):
        embed_file.embed_file(other, str(text), tmp_path / "x.npy", 8)
    embed_file.embed_file(FakeModel(), str(text), tmp_path / "x.npy", 8)
    assert np.load(tmp_path / "x.npy")[:, 1].tolist() == [*range(10)]


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no such call")
def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    text = tmp_path / "lines.txt"
    text.write_text("1\n2\n")
    with pytest.raises(OSError, match="No space left"):
        embed_file.embed_file(FakeModel(), str(text), tmp_path / "v.npy", 8)
    assert [*tmp_path.iterdir()] == [text]


def test_lines_of_blocks_are_those_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(embed_file, "BLOCK", 2)
    text = tmp_path / "lines.txt"
    text.write_bytes(b"\xef\xbb\xbfone\r\n\ntwo\nthree\nfo\xff\n")
    with pytest.raises(UserError, match=r"name:5: is not UTF-8"):
        [*embed_file.line_blocks(str(text), "name")]
    text.write_bytes(b"\xef\xbb\xbfone\r\n\ntwo\nthree")
    blocks = [*embed_file.line_blocks(str(text), "")]
    assert blocks == [["one", ""], ["two", "three"]]


def test_widths_are_cut_and_made_of_length_one():
    vectors = np.array([[3.0, 4, 1], [0, 0, 2]], np.float32)
    assert embed_texts.narrow(vectors, 2, False).tolist() == [[3, 4], [0, 0]]
    np.testing.assert_allclose(
        embed_texts.narrow(vectors, 2, True), [[0.6, 0.8], [0, 0]], rtol=1e-6
    )


# ---------------------------------------------------------------- whole runs
@pytest.fixture(scope="module")
def runs(trained, folder, tmp_path_factory):  # noqa: F811
    """A function of a kind -> the workdir of its run, made at the first request."""
    made = {}

    def run(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("runs") / kind
            train.main([
                f"--config=finetune/{kind}.py:smoke",
                f"--config.init_from={trained}",
                f"--config.data.train={folder}",
                f"--config.data.valid={folder}",
                "--config.data.length=24",
                "--config.batch_size=16",
                "--config.total.steps=40",
                "--config.optim.lr=3e-3",
                "--config.eval.every.steps=40",
                "--config.checkpoint.every.steps=40",
                f"--workdir={made[kind]}",
            ])  # fmt: skip
        return made[kind]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_learns_and_opens_elsewhere(kind, runs, folder, tmp_path, capsys):  # noqa: F811
    """Losses fall; evaluate and sentence-transformers agree with training."""
    workdir = runs(kind)
    rows = read_rows(workdir)
    losses = [r[f"train/{kind}_loss"] for r in rows if f"train/{kind}_loss" in r]
    # A mini model does not learn to compare two texts in so few updates.
    assert kind == "rerank" or np.mean(losses[-5:]) < losses[0] * 0.85
    evaluate.main([f"--workdir={workdir}", "--json"])
    told = json.loads(capsys.readouterr().out)
    for name in ("mrr@10", "recall@1"):
        assert told[name] == pytest.approx(rows[-1][f"eval/valid/{name}"], abs=1e-6)
    hf = tmp_path / "hf"
    convert.main([f"--from={workdir}", f"--to={hf}", "--format=hf"])
    st = pytest.importorskip("sentence_transformers", minversion="6")
    texts = [f"what is the {word} ?" for word in WORDS[:3]]
    if kind == "rerank":
        theirs = st.CrossEncoder(str(hf)).predict([(t, t) for t in texts])
        from bertjax.inference.cross_encoder import CrossEncoder

        pairs = np.repeat(np.arange(3), 2).reshape(3, 2)
        ours = CrossEncoder(str(workdir), "--model").score(texts, texts, pairs)
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
        asked = tmp_path / "asked.jsonl"
        rows = [json.dumps({"query": t, "positive": t}) + "\n" for t in texts]
        asked.write_text("".join(rows))
        for model in (workdir, hf):
            out = tmp_path / "answers.jsonl"
            predict.main([f"--model={model}", f"--input={asked}", f"--out={out}"])
            values = [json.loads(line)["value"] for line in out.open()]
            np.testing.assert_allclose(values, ours, atol=1e-5)
        return
    name = {"splade": "SparseEncoder", "colbert": "MultiVectorEncoder"}.get(kind)
    theirs = getattr(st, name or "SentenceTransformer")(str(hf)).encode(texts)
    ours, _ = embed_texts.open_embedder(str(workdir), "--model").make_index(texts)
    if kind == "splade":
        ours, theirs = ours.weights.toarray(), theirs.to_dense().numpy()
        largest = ours > 0  # the task.active largest; theirs has all
        assert (largest.sum(axis=1) == 256).all()
        ours, theirs = ours[largest], theirs[largest]
    elif kind == "colbert":
        ours, theirs = ours.tokens, np.concatenate([x.numpy() for x in theirs])
    else:
        ours = ours.vectors
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.slow
def test_mined_negatives_and_margins_are_learnt(runs, folder, tmp_path, capsys):  # noqa: F811
    mined = tmp_path / "mined.jsonl"
    given = [f"--model={runs('retrieve')}", "--what=retrieval", "--json"]
    given += [f"--text={folder}/qrels/train.tsv", f"--rerank={runs('rerank')}"]
    more = ["--depth=4", f"--mine={mined}", "--negatives=2", "--margin=0"]
    evaluate.main([*given, *more, "--precision=int8,binary"])
    told = json.loads(capsys.readouterr().out)
    assert told["precisions"]["int8"]["index_bytes"] < told["index_bytes"] / 2
    rows = [json.loads(line) for line in mined.open()]
    assert len(rows) == 16 and all(
        len(r["scores"]) == 1 + len(r["negatives"]) and r["positive"] for r in rows
    )
    train.main([
        "--config=finetune/retrieve.py:smoke",
        f"--config.init_from={runs('retrieve')}",
        f"--config.data.train={mined}",
        "--config.task.margin_weight=0.5",
        "--config.task.negatives=2",
        "--config.task.widths=16",
        "--config.task.chunks=4",
        "--config.data.length=24",
        "--config.total.steps=4",
        f"--workdir={tmp_path / 'w'}",
    ])  # fmt: skip
    assert "train/retrieve_16_margin_loss" in read_rows(tmp_path / "w")[-1]
    with pytest.raises(UserError, match=r"--mine=.*\.txt is not a name of such a file"):
        evaluate.main([*given, f"--mine={tmp_path}/x.txt"])
    with pytest.raises(UserError, match=r"--negatives needs --mine=FILE"):
        evaluate.main([*given, "--negatives=2"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["splade", "colbert"])
def test_vectors_of_other_kinds_are_written(kind, runs, tmp_path):
    lines = tmp_path / "lines.txt"
    lines.write_text("what is a list ?\nthe value\n")
    given = [f"--model={runs(kind)}", f"--text={lines}"]
    out = tmp_path / "v.npz"
    embed.main([*given, f"--out={out}"])
    if kind == "splade":
        from scipy.sparse import load_npz

        assert load_npz(out).shape[0] == 2
    else:
        arrays = np.load(out)
        assert arrays["offsets"][-1] == len(arrays["tokens"])
    with pytest.raises(UserError, match=r"vectors of this model are .*: a \.npz"):
        embed.main([*given, f"--out={tmp_path / 'v.npy'}"])
    with pytest.raises(UserError, match="--pooling has no effect"):
        embed.main([*given, f"--out={out}", "--pooling=cls"])
