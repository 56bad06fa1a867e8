# SPDX-License-Identifier: Apache-2.0
"""Vectors of sentences: as for one sentence at a time, in order, with any model."""

import dataclasses
import gzip
import json
import os
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import ENCODERS
from safetensors.numpy import load_file, save_file

from bertjax import UserError, convert, embed
from bertjax.assembly.models import open_model
from bertjax.config.schema import base
from bertjax.inference import embed_texts, forward
from bertjax.inference.cross_encoder import CrossEncoder
from bertjax.interop import sentence_transformers
from bertjax.interop.sentence_transformers import Sentences
from bertjax.models import encoder
from bertjax.models.config import EncoderConfig
from bertjax.tasks import passage_index, tables

LINES = [
    "the cat sat .",
    "",
    "a list of words " * 30,
    "of",
    "a [MASK] is [SEP] é\u2028x",
]
SIZES = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=130,
    initializer_range=0.5,
)


# ---------------------------------------------------------------- computing
@pytest.mark.parametrize(
    "name",
    [
        "bert",
        pytest.param("shared", marks=pytest.mark.slow),
        pytest.param("local", marks=pytest.mark.slow),
    ],
)
def test_as_one_by_one_and_in_order(name):
    """Compare with each row alone, without padding; pooling is in numpy, float64."""
    cfg = EncoderConfig(**SIZES, **ENCODERS[name], unroll=1)
    params = {"encoder": encoder.init(jax.random.key(1), cfg)}
    rng = np.random.default_rng(2)
    lengths = [2, 130, 17, 2, 64, 17, 2]
    rows = [rng.integers(1, 40, n, dtype=np.int32) for n in lengths]
    apply = jax.jit(lambda batch: encoder.apply(params["encoder"], cfg, batch).hidden)
    hidden = []
    for row in rows:
        batch = {"input_ids": row[None], "attention_mask": np.ones_like(row[None])}
        hidden.append(np.asarray(apply(batch)[0], np.float64))
    means = np.stack([h.mean(0) for h in hidden])
    firsts = np.stack([h[0] for h in hidden])
    firsts /= np.linalg.norm(firsts, axis=1, keepdims=True)
    lasts = np.stack([h[-1] for h in hidden])
    for pooling, normalize, want in (
        ("mean", False, means), ("cls", True, firsts), ("last", False, lasts)
    ):  # fmt: skip
        encode = embed_texts.make_encoder(cfg, params, pooling, normalize)
        got = embed_texts.embed_rows(encode, rows, 0, 4, 130)
        assert got.shape == (7, 16) and got.dtype == np.float32
        np.testing.assert_allclose(got, want, atol=3e-5)


@pytest.mark.parametrize("longest", [2, 30, 130, 512, 8192])
def test_few_shapes_and_every_row_once(longest):
    rng = np.random.default_rng(longest)
    sizes = np.append(rng.integers(2, longest + 1, 200), longest)
    rows = [np.full(n, 7, np.int32) for n in sizes]
    seen, shapes = [], set()
    for which, batch in forward.pad_batches(rows, 0, 8, longest):
        ids, lengths = batch["input_ids"], batch["sizes"]
        assert ids.shape[1] <= longest
        assert (lengths[: len(which)] == sizes[which]).all()
        assert ((ids > 0).sum(1)[: len(which)] == sizes[which]).all()
        seen += which.tolist()
        shapes.add(ids.shape)
    assert sorted(seen) == list(range(201))
    most = forward.MORE_LENGTHS if sizes.sum() >= forward.MANY else forward.LENGTHS
    assert len(shapes) <= most


def test_a_cpu_works_on_parts_of_a_batch(monkeypatch):
    cfg = EncoderConfig(**SIZES)
    params = encoder.init(jax.random.key(3), cfg)
    batch = {
        "input_ids": np.random.default_rng(0).integers(5, 40, (6, 8), np.int32),
        "sizes": np.arange(3, 9, dtype=np.int32),
    }
    found = []
    for tokens, parts in (2**11, 1), (17, 3), (1, 6):
        monkeypatch.setattr(forward, "CPU_TOKENS", tokens)
        monkeypatch.setattr(forward, "count_cores", lambda: 1)
        assert forward.count_cpu_chunks(6, 8) == parts
        forward.make_forward.cache_clear()
        encode = embed_texts.make_encoder(cfg, {"encoder": params}, "mean", True)
        found.append(encode(batch))
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)
    np.testing.assert_allclose(found[2], found[0], atol=1e-6)


# ---------------------------------------------------------------- the command
@pytest.fixture
def text(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_bytes("\r\n".join(LINES).encode() + b"\n")
    return path


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "hf"
    convert.main([f"--from={trained}", f"--to={folder}", "--format=hf"])
    return folder


def run(model, text, out, *more):
    embed.main([f"--model={model}", f"--text={text}", f"--out={out}", *more])
    return np.load(out)


def test_vectors_that_are_no_numbers_are_refused(monkeypatch):
    """They were written, and compare with nothing."""

    def encode(batch):
        vectors = np.ones((len(batch["input_ids"]), 4), np.float32)
        vectors[batch["input_ids"][:, 0] == len("two")] = np.nan
        return vectors

    def tokenize(tokenizer, lines, longest):
        return [np.full(4, len(line), np.int32) for line in lines], 0

    monkeypatch.setattr(embed_texts, "tokenize", tokenize)
    how = Sentences(longest=64)
    model = embed_texts.Embedder(encode, SimpleNamespace(pad_id=0), how, None, {})
    assert model.embed(["first", "second"])[0].shape == (2, 4)
    with pytest.raises(UserError, match=r"vector of 'two' is not finite: its weights"):
        model.embed(["first", "two"])


def test_no_texts_have_no_vectors():
    assert embed_texts.embed_rows(None, [], 0, 32, 64).shape == (0, 0)


def test_workdir_checkpoint_and_exported(trained, exported, text, tmp_path, capsys):
    first = run(trained, text, tmp_path / "a.npy")
    said = capsys.readouterr().err
    assert "5 rows of" in said and "mean pooling" in said and "1 empty line" in said
    assert first.dtype == np.float32 and first.shape[0] == len(LINES)
    assert np.isfinite(first).all() and np.ptp(first, axis=0).max() > 0
    run(trained, text, tmp_path / "b.npy")
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()
    newest = trained / "checkpoints" / "12"
    np.testing.assert_array_equal(run(newest, text, tmp_path / "c.npy"), first)
    one = run(exported, text, tmp_path / "d.npy", "--batch_size=1")
    np.testing.assert_allclose(one, first, atol=1e-5)
    ends = {p.name for p in tmp_path.iterdir()}
    assert ends == {"lines.txt", *(f"{x}.npy" for x in "abcd")}
    assert [*exported.glob("*/config.json")] == [exported / "1_Pooling/config.json"]


def test_options(trained, text, tmp_path):
    mean = run(trained, text, tmp_path / "a.npy")
    unit = run(trained, text, tmp_path / "a.npy", "--normalize")
    sizes = np.linalg.norm(mean, axis=1, keepdims=True)
    np.testing.assert_allclose(unit, mean / sizes, atol=1e-6)
    first = run(trained, text, tmp_path / "a.npy", "--pooling=cls")
    assert np.abs(first - mean).max() > 1e-2
    with pytest.raises(UserError, match="--width=33: the model's vectors have 32 num"):
        run(trained, text, tmp_path / "b.npy", "--width=33")
    with pytest.raises(UserError, match="--words needs --index=DIR"):
        run(trained, text, tmp_path / "b.npy", "--words=5")
    rough = run(trained, text, tmp_path / "a.npy", "--dtype=bfloat16")
    assert rough.dtype == np.float32
    np.testing.assert_allclose(rough, mean, atol=0.1)


def test_standard_input_and_a_shorter_length(trained, tmp_path, pipe, capsys):
    first, line = tmp_path / "first.txt", "a list of words"
    first.write_text("a list\n")
    pipe(f"{line} {line}\n{line}\n")
    cut = run(trained, "-", tmp_path / "a.npy", "--max_length=4")
    assert "2 lines cut at 4 tokens" in capsys.readouterr().err
    np.testing.assert_array_equal(cut[0], cut[1])
    packed = tmp_path / "first.txt.gz"
    packed.write_bytes(gzip.compress(first.read_bytes()))
    whole = run(trained, packed, tmp_path / "b.npy")
    np.testing.assert_allclose(cut[:1], whole, atol=1e-5)
    with pytest.raises(
        UserError, match=r"--max_length=9999: the model has .* positions"
    ):
        run(trained, first, tmp_path / "b.npy", "--max_length=9999")


def test_as_the_process_does(command, trained, text, tmp_path):
    out = tmp_path / "a.npy"
    done = command("embed", f"--model={trained}", f"--text={text}", f"--out={out}")
    assert done.returncode == 0 and done.stdout == ""
    np.testing.assert_allclose(
        np.load(out), run(trained, text, tmp_path / "b.npy"), atol=1e-5
    )


@pytest.mark.parametrize("flag", ["--out", "--index"])
def test_two_processes_do_not_write_the_same(
    flag, trained, text, tmp_path, monkeypatch
):
    written = f"{flag}={tmp_path / 'a.npy'}"
    given = [f"--model={trained}", f"--text={text}", written]

    def run_again(*args):
        monkeypatch.undo()
        embed.main(given)

    monkeypatch.setattr(embed, "embed_file", run_again)
    monkeypatch.setattr(embed.embed_index, "make_index", run_again)
    with pytest.raises(UserError, match=f"^{written}: another process writes it"):
        embed.main(given)


def test_an_index_whose_passages_were_being_written_goes_on(
    trained, text, tmp_path, monkeypatch
):
    given = [f"--model={trained}", f"--text={text}", f"--index={tmp_path / 'index'}"]

    def stop(folder, passages):
        (folder / passage_index.PASSAGES).write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(passage_index, "write_passages", stop)
    with pytest.raises(KeyboardInterrupt):
        embed.main(given)
    monkeypatch.undo()
    embed.main(given)
    index = passage_index.PassageIndex(str(tmp_path / "index"), "--index")
    assert index.passages and index.facts["how"]["normalize"]
    np.testing.assert_allclose(np.linalg.norm(index.vectors, axis=1), 1, atol=1e-5)


def test_the_first_token_of_a_decoder_says_nothing():
    cfg = EncoderConfig(**SIZES, is_decoder=True)
    model = SimpleNamespace(
        cfg=cfg,
        tokenizer=SimpleNamespace(lower_case=True),
        checkpoint=None,
        meta={},
        config=base(),
    )
    with pytest.raises(UserError, match=r"^m: --pooling=cls: the first token of a dec"):
        embed_texts.make_embedder(model, "m", pooling="cls")


def test_refusals_leave_what_was_there(trained, text, tmp_path):
    out = tmp_path / "out.npy"
    out.write_bytes(b"before")
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"good\n\xff\xfe\n")
    none = tmp_path / "none.txt"
    none.write_bytes(b"")
    given = {"model": trained, "text": text, "out": out}
    for change, words in [
        ({"model": ""}, ["--model"]),
        ({"model": tmp_path / "no"}, ["--model", "no"]),
        ({"text": tmp_path / "no.txt"}, ["--text", "no.txt", "No such file"]),
        ({"text": tmp_path}, ["--text", "directory"]),
        ({"text": "/dev/zero"}, ["--text=/dev/zero", "neither a file nor a pipe"]),
        ({"text": bad}, ["bad.txt:2: ", "UTF-8"]),
        ({"text": none}, ["none.txt", "empty"]),
        ({"text": tmp_path / "a.jsonl.gz"}, ["a.jsonl.gz is JSON", "--index=DIR"]),
        ({"out": tmp_path / "out.txt"}, ["--out", ".npy"]),
        ({"out": tmp_path / "no/out.npy"}, ["--out", "directory"]),
        ({"pooling": "max"}, ["--pooling", "max", "mean"]),
        ({"pooling": ""}, ["--pooling"]),
        ({"dtype": "int7"}, ["dtype", "int7"]),
        ({"batch_size": 0}, ["batch_size"]),
    ]:
        flags = [f"--{k}={v}" for k, v in {**given, **change}.items()]
        with pytest.raises(UserError) as e:
            embed.main(flags)
        assert all(w in str(e.value) for w in words), e.value
        assert "\n" not in str(e.value)
        assert out.read_bytes() == b"before"
    assert not list(tmp_path.glob(".*partial"))


def test_writing_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    out = tmp_path / "out.npy"
    embed.write(out, np.ones((2, 3), np.float32))

    def full(file, array):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(UserError, match="No space left"):
        embed.write(out, np.zeros((2, 3), np.float32))
    assert np.load(out).sum() == 6
    assert [p.name for p in tmp_path.iterdir()] == ["out.npy"]


# ---------------------------------------------------------------- kinds of models
@pytest.mark.parametrize(
    "told",
    [
        Sentences(),
        Sentences("cls", True, 64),
        Sentences("max", False, 32, True, "query: "),
    ],
)
def test_files_there_and_back(told, tmp_path):
    sentence_transformers.write(tmp_path, told, 16, 128)
    longest = told.longest or 128
    got = sentence_transformers.read(tmp_path, "here")
    assert got == dataclasses.replace(told, longest=longest)
    types = [m["type"] for m in json.loads((tmp_path / "modules.json").read_text())]
    assert len(types) == 2 + told.normalize


def test_what_a_directory_says_is_followed_and_kept(exported, text, tmp_path, capsys):
    """embed follows it, and convert keeps it, to a workdir and back."""
    theirs = tmp_path / "theirs"
    shutil.copytree(exported, theirs)
    shutil.rmtree(theirs / "1_Pooling")
    sentence_transformers.write(theirs, Sentences("cls", True, 16), 32, 512)
    capsys.readouterr()
    first = run(theirs, text, tmp_path / "a.npy")
    assert "cls pooling, of length 1; 1 line cut at 16" in capsys.readouterr().err
    np.testing.assert_allclose(np.linalg.norm(first, axis=1), 1, atol=1e-6)
    convert.main([f"--from={theirs}", f"--to={tmp_path / 'w'}"])
    np.testing.assert_array_equal(run(tmp_path / "w", text, tmp_path / "b.npy"), first)
    back = tmp_path / "back"
    convert.main([f"--from={tmp_path / 'w'}", f"--to={back}", "--format=hf"])
    assert sentence_transformers.read(back, "") == Sentences("cls", True, 16)
    plain = run(theirs, text, tmp_path / "c.npy", "--pooling=mean", "--nonormalize")
    assert np.abs(np.linalg.norm(plain, axis=1) - 1).max() > 1e-2


def test_unknown_steps_are_refused(exported, text, tmp_path):
    theirs = tmp_path / "theirs"
    shutil.copytree(exported, theirs)
    listed = json.loads((theirs / "modules.json").read_text())
    dense = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    away = [listed[0], {**listed[1], "path": "../1_Pooling"}]
    own = [{**listed[0], "type": "their.Transformer"}, listed[1]]
    for steps, word in [
        ([*listed, dense], r"Transformer\+Pooling\+Dense"),
        (listed[::-1], r"Pooling\+Transformer"),
        ([*listed, listed[1]], r"Pooling\+Pooling"),
        (listed[:1], "by Transformer,"),
        ([], "by nothing"),
        (own, r"their\.Transformer"),
        (away, "elsewhere"),
        (3, "list"),
    ]:
        (theirs / "modules.json").write_text(json.dumps(steps))
        with pytest.raises(UserError, match=word):
            run(theirs, text, tmp_path / "a.npy")
    (theirs / "modules.json").write_text(json.dumps(listed))
    pooling = theirs / "1_Pooling/config.json"
    for told, word in [
        ({"pooling_mode": ["mean", "max"]}, "mean.max"),
        ([], "1_Pooling: config.json"),
    ]:
        pooling.write_text(json.dumps(told))
        with pytest.raises(UserError, match=word):
            run(theirs, text, tmp_path / "a.npy")
    pooling.write_text(json.dumps({"pooling_mode": "max"}))
    assert run(theirs, text, tmp_path / "a.npy", "--pooling=mean").shape[0] == 5


def test_a_cross_encoder_has_no_vectors(trained, exported, text, tmp_path, capsys):
    opened = open_model(str(trained), "--model")
    opened.meta["config"]["objective"] = "rerank"
    with pytest.raises(UserError, match="it is a cross-encoder, which scores two"):
        embed_texts.make_embedder(opened, "it")
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    shutil.copytree(exported, theirs)
    made = Sentences(
        longest=20, kind=sentence_transformers.CROSS, activation="a.Sigmoid"
    )
    sentence_transformers.write(theirs, made, 16, 32)
    with pytest.raises(UserError, match=r"--model=.*theirs is a cross-encoder"):
        run(theirs, text, tmp_path / "a.npy", "--pooling=mean")
    # A converted cross-encoder is one again.
    convert.main([f"--from={theirs}", f"--to={back}", "--format=hf"])
    read = sentence_transformers.read(back, "")
    assert (read.kind, read.activation, read.longest) == ("cross", "a.Sigmoid", 20)


def test_a_sparse_model_with_more_pieces_than_its_tokenizer(exported, text, tmp_path):
    from scipy.sparse import load_npz

    shutil.copytree(exported, theirs := tmp_path / "theirs")
    made = Sentences(kind="sparse", dot=True, longest=20)
    sentence_transformers.write(theirs, made, 32, 32)
    tensors = load_file(file := theirs / "model.safetensors")
    rows = len(tensors["bert.embeddings.word_embeddings.weight"]) + 8
    for name, wide in tensors.items():
        if len(wide) == rows - 8:
            more = ((0, 8), *((0, 0),) * (wide.ndim - 1))
            tensors[name] = np.pad(wide, more, constant_values=1)
    save_file(tensors, file)
    told = json.loads((theirs / "config.json").read_text())
    told["vocab_size"] = rows
    (theirs / "config.json").write_text(json.dumps(told))
    out = tmp_path / "a.npz"
    embed.main([f"--model={theirs}", f"--text={text}", f"--out={out}"])
    assert load_npz(out).shape == (len(LINES), rows)


def test_a_cross_encoder_of_others_reads_two_texts(exported, tmp_path):
    """Its config.json has a head of one class, but no columns."""
    shutil.copytree(exported, theirs := tmp_path / "theirs")
    told = json.loads((theirs / "config.json").read_text())
    told["architectures"] = ["BertForSequenceClassification"]
    told["id2label"] = {"0": "LABEL_0"}
    (theirs / "config.json").write_text(json.dumps(told))
    tensors = load_file(file := theirs / "model.safetensors")
    draw = np.random.default_rng(0).normal(size=(1, 32)).astype(np.float32)
    tensors |= {"classifier.weight": draw, "classifier.bias": np.zeros(1, np.float32)}
    save_file(tensors, file)
    pairs = np.array([[0, 0], [0, 1], [1, 0]])
    texts = ["the list", "a value"], ["a list of words", "the value"]
    scores = CrossEncoder(str(theirs), "--rerank").score(*texts, pairs)
    assert len({*scores.tolist()}) == 3
    # A regression model of bertjax for one text is refused.
    (theirs / "config.json").write_text(json.dumps({**told, "bertjax_text": "text"}))
    with pytest.raises(UserError, match=r"--rerank=.*theirs scores one text, and a"):
        CrossEncoder(str(theirs), "--rerank")


def test_limits_and_prompts_of_a_directory(exported, text, tmp_path, capsys):
    """Without sentence_bert_config.json, tokenizer_config.json has the length."""
    theirs = tmp_path / "theirs"
    shutil.copytree(exported, theirs)
    (theirs / sentence_transformers.LIMITS).unlink()
    config = json.loads((theirs / sentence_transformers.TOKENIZER).read_text())

    def longest(value):
        told = json.dumps({**config, "model_max_length": value})
        (theirs / sentence_transformers.TOKENIZER).write_text(told)
        return sentence_transformers.read(theirs, "here").longest

    assert [longest(n) for n in (10**30, 1e30, None, 16)] == [0, 0, 0, 16]
    with pytest.raises(UserError, match="model_max_length='x'"):
        longest("x")
    longest(16)
    (theirs / sentence_transformers.OLD_LIMITS[0]).write_text('{"max_seq_length": 20}')
    assert sentence_transformers.read(theirs, "here").longest == 20
    (theirs / sentence_transformers.MODULES).rename(
        tmp_path / sentence_transformers.MODULES
    )
    assert sentence_transformers.read(theirs, "here").longest == 16
    (tmp_path / sentence_transformers.MODULES).rename(
        theirs / sentence_transformers.MODULES
    )

    prompts = theirs / sentence_transformers.PROMPTS
    prompts.write_text('{"prompts": {"q": "the cat "}, "default_prompt_name": "q"}')
    capsys.readouterr()
    got = run(theirs, text, tmp_path / "a.npy")
    assert "each after 'the cat '; 1 line cut at 20" in capsys.readouterr().err
    longer = tmp_path / "longer.txt"
    longer.write_text("\n".join(f"the cat {x}" for x in LINES) + "\n")
    prompts.unlink()
    np.testing.assert_array_equal(run(theirs, longer, tmp_path / "b.npy"), got)
    prompts.write_text('{"default_prompt_name": "q"}')
    with pytest.raises(UserError, match="no prompt 'q'"):
        run(theirs, text, tmp_path / "a.npy")
    prompts.write_text('{"truncate_dim": 8}')
    with pytest.raises(UserError, match="mean cut to 8 numbers"):
        run(theirs, text, tmp_path / "a.npy")
    out = tmp_path / "out"
    convert.main([f"--from={theirs}", f"--to={out}", "--format=hf"])
    assert "vectors of sentences are made by mean cut" in capsys.readouterr().err
    assert not (out / sentence_transformers.MODULES).exists()
    prompts.unlink()

    (theirs / sentence_transformers.LIMITS).write_text('{"do_lower_case": true}')
    run(theirs, text, tmp_path / "a.npy")  # the tokenizer lower-cases
    tokenizer = (theirs / "tokenizer.json").read_text()
    cased = tokenizer.replace('"lowercase": true', '"lowercase": false')
    assert cased != tokenizer
    (theirs / "tokenizer.json").write_text(cased)
    with pytest.raises(UserError, match="do_lower_case=true"):
        run(theirs, text, tmp_path / "a.npy")


def test_a_pipe_is_read_to_its_end():
    """For example --text=<(zcat lines.txt.gz)."""
    reader, writer = os.pipe()
    os.write(writer, b"one\ntwo\n")
    os.close(writer)
    assert tables.read_lines(f"/dev/fd/{reader}", "--text") == ["one", "two"]
    os.close(reader)
