# SPDX-License-Identifier: Apache-2.0
"""convert --add_words: larger vocabularies, and models with more embeddings."""

import json

import numpy as np
import pytest
from conftest import refused, succeeded, train_losses

from bertjax import UserError
from bertjax.assembly import models
from bertjax.data.tokenizers import add_words
from bertjax.data.tokenizers.export_tokenizer import make_json, write_tokenizer
from bertjax.data.tokenizers.tokenizer import load_tokenizer, train_tokenizer
from bertjax.interop.resize_embeddings import drop_rows, grow_rows

WORDS = ["photovoltaic", "interferometer", "Zymurgy", "spectroheliograph"]
OLD = ["the", "", "photovoltaic", "two words", "self-made"]
KINDS = ["wordpiece", "byte_bpe", "unigram"]


def lines(corpus):
    text = (corpus / "train.txt").read_text("utf-8")
    return [line for line in text.split("\n") if line]


@pytest.fixture(
    scope="module", params=[f"{k}{j}" for k in KINDS for j in ("", "-json")]
)
def tokenizer(request, corpus, tmp_path_factory):
    """A tokenizer of each kind, opened from its own files or from a tokenizer.json."""
    kind, _, exported = request.param.partition("-")
    made = train_tokenizer(lines(corpus), kind, 700)
    if exported:
        folder = tmp_path_factory.mktemp("tokenizer")
        write_tokenizer(made, folder, True, 128)
        made = load_tokenizer(folder)
    return made


@pytest.fixture
def grown(tokenizer):
    words = [*WORDS, *OLD, f"{tokenizer.mask_token}s"]
    return add_words.add_words(tokenizer, words, "--add_words=FILE")


def test_words_are_one_piece(tokenizer, grown):
    new = grown.tokenizer
    first = tokenizer.vocab_size
    assert new.pieces[:first] == tokenizer.pieces
    assert new.roles == tokenizer.roles
    assert new.special_ids.tolist() == tokenizer.special_ids.tolist()
    assert grown.words == len(WORDS) + (tokenizer.kind == "unigram")
    forms = 1 if tokenizer.kind == "wordpiece" else 2
    assert new.vocab_size == first + forms * grown.words == first + len(grown.origins)
    for word in WORDS:
        sentence = f"In the {word}, a {word} is ({word})."
        ids = new.encode(sentence)
        added = [i for i in ids if i >= first]
        assert len(added) == 3
        # With the old pieces in place of the new one, the ids are the old ids.
        origins = dict(enumerate(grown.origins, first))
        flat = [o for i in ids for o in origins.get(i, [i])]
        assert flat == tokenizer.encode(sentence)
        assert new.decode(ids) == tokenizer.decode(flat)
    assert new.word_starts[first]


def test_other_texts_keep_their_ids(tokenizer, grown, corpus):
    texts = lines(corpus)
    assert grown.tokenizer.encode_batch(texts) == tokenizer.encode_batch(texts)


def test_counts(tokenizer, grown):
    """SentencePiece splits only at spaces, so that "self-made" is a word."""
    words = len(WORDS) + (tokenizer.kind == "unigram")
    pieces = "" if tokenizer.kind == "wordpiece" else f" as {2 * words} pieces"
    told = str(grown)
    want = f"{words} words added{pieces}; 1 empty; 1 twice; 1 known as one piece"
    assert told.startswith(want)
    assert "1 with a special token" in told
    left = sum(grown.skipped.values()) + grown.words
    assert left == len(WORDS) + len(OLD) + 1


def test_unknown_character(tokenizer):
    """Unigram has no piece to score it by; WordPiece has [UNK], BPE its bytes."""
    word = "snow\u0436man"
    if tokenizer.kind == "unigram":
        with pytest.raises(UserError, match="1 with a character that the vocabulary"):
            add_words.add_words(tokenizer, [word], "--add_words=x")
    else:
        assert add_words.add_words(tokenizer, [word], "--add_words=x").words == 1


def test_bpe_of_sentencepiece(corpus):
    tokenizer = train_tokenizer(lines(corpus), "bpe", 700)
    with pytest.raises(UserError, match="SentencePiece's BPE"):
        add_words.add_words(tokenizer, WORDS, "--add_words=x")


def test_export_has_the_same_ids(grown, corpus):
    """The tokenizers library encodes with our tokenizer.json as our tokenizer does."""
    from tokenizers import Tokenizer

    new = grown.tokenizer
    library = Tokenizer.from_str(json.dumps(make_json(new, True)))
    texts = [t.replace("the", WORDS[i % 3]) for i, t in enumerate(lines(corpus)[:300])]
    texts = [t for t in texts if not any(p in t for p in ("[", "<"))]
    theirs = library.encode_batch(texts, add_special_tokens=False)
    ours = new.encode_batch(texts)
    assert [e.ids for e in theirs] == ours
    assert max(map(max, ours)) >= new.vocab_size - len(grown.origins)


def test_saved_and_loaded(grown, tmp_path):
    grown.tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.identity == grown.tokenizer.identity
    assert again.encode(WORDS[0]) == grown.tokenizer.encode(WORDS[0])


def test_nothing_to_add(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"no word to add \(2 empty, 1 known"):
        add_words.add_words(tokenizer, ["", "", "the"], "--add_words=x")
    with pytest.raises(UserError, match="cannot be read"):
        add_words.read_words(str(tmp_path / "no"), "--add_words")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    with pytest.raises(UserError, match="not UTF-8"):
        add_words.read_words(str(tmp_path / "latin"), "--add_words")


def test_rows():
    """New rows are means of old rows. They replace padding rows first, and further
    padding rows stay."""
    word = np.arange(12, dtype=np.float32).reshape(6, 2)
    tree = {
        "encoder": {"embeddings": {"word": word, "norm": {"bias": word[0]}}},
        "mlm": {"bias": word[:, 0], "decoder": -word, "norm": {"bias": word[1]}},
    }
    grown = grow_rows(tree, 5, [[0, 1], [4]])
    want = np.concatenate([word[:5], [[1, 2], [8, 9]]])
    np.testing.assert_array_equal(grown["encoder"]["embeddings"]["word"], want)
    np.testing.assert_array_equal(grown["mlm"]["decoder"], -want)
    np.testing.assert_array_equal(grown["mlm"]["bias"], want[:, 0])
    assert grown["mlm"]["norm"]["bias"] is tree["mlm"]["norm"]["bias"]
    assert grow_rows(tree, 3, [[0]])["mlm"]["bias"].tolist() == [0, 2, 4, 0, 8, 10]
    left = drop_rows(tree, 5)
    assert left["mlm"]["bias"].tolist() == [0, 2, 4, 6, 8]
    assert left["encoder"]["embeddings"]["word"].shape == (5, 2)
    assert left["mlm"]["norm"]["bias"] is tree["mlm"]["norm"]["bias"]


@pytest.mark.slow
def test_commands(command, arguments, trained, tmp_path):
    """Words are added to a run or its export with one result, which trains further."""
    file = tmp_path / "words.txt"
    file.write_text("\n".join([*WORDS, *OLD]) + "\n", "utf-8")
    first, second = tmp_path / "grown", tmp_path / "grown_hf"
    plain, third = tmp_path / "plain_hf", tmp_path / "from_hf"
    add, as_hf = f"--add_words={file}", "--format=hf"
    done = succeeded(command("convert", f"--from={trained}", f"--to={first}", add))
    assert "4 words added" in done.stderr
    for source, target, *more in [
        (first, second, as_hf),
        (trained, plain, as_hf),
        (plain, third, as_hf, add),
    ]:
        succeeded(command("convert", f"--from={source}", f"--to={target}", *more))
    name = "model.safetensors"
    assert (second / name).read_bytes() == (third / name).read_bytes()
    assert json.loads((second / "config.json").read_text())["vocab_size"] == 1004
    _, old, checkpoint, _ = models.open_model(str(trained), "x")
    _, new, imported, _ = models.open_model(str(second), "x")
    before, after = models.read_params(checkpoint), models.read_params(imported)
    rows = after["encoder"]["embeddings"]["word"]
    np.testing.assert_array_equal(
        rows[: old.vocab_size], before["encoder"]["embeddings"]["word"]
    )
    (i,) = new.encode(WORDS[0])
    mean = rows[old.encode(WORDS[0])].mean(axis=0)
    np.testing.assert_allclose(rows[i], mean, atol=1e-6)
    refused(
        command("convert", f"--from={trained}", f"--to={file}x", f"{add}x"), "add_w"
    )

    given = [a for a in arguments if "model." not in a and "vocab" not in a]
    for n, source in enumerate((first, second)):
        run = tmp_path / f"run{n}"
        more = [f"--config.init_from={source}", f"--workdir={run}"]
        succeeded(command("train", *given, "--config.total.steps=3", *more))
        assert train_losses(run)[0] < train_losses(trained)[1]
