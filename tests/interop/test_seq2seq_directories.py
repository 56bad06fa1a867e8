# SPDX-License-Identifier: Apache-2.0
"""T5's and BART's directories with tokenizers: opened, converted and written."""

import io
import json

import pytest
import seq2seq_data as data
from safetensors.numpy import load_file
from test_gpt2 import END, with_tokenizer

from bertjax import UserError, convert, fill_mask
from bertjax.assembly.models import open_model
from bertjax.data.tokenizers.export_tokenizer import special_around, write_tokenizer
from bertjax.data.tokenizers.tokenizer import load_tokenizer
from bertjax.interop.generation_config import FILE, GenerationSettings

GOLDEN = data.layouts()
TEXTS = ["The dog walks in the park.", "A list is a house of dogs.", "walks, parks."]


def spiece():
    """Return the bytes of a SentencePiece model that begins with <pad> </s> <unk>, as
    T5's does."""
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=out, vocab_size=36, pad_id=0,
        eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return out.getvalue()


def write(folder, name, **config):
    told = {**GOLDEN[name]["config"], **config}
    return data.write(folder, told, GOLDEN[name]["shapes"])


def with_t5(folder, extra_ids=4):
    (folder / "spiece.model").write_bytes(spiece())
    told = {"tokenizer_class": "T5Tokenizer", "extra_ids": extra_ids}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def with_bart(folder):
    first, last = ["<s>", "<pad>", "</s>", "<unk>", "Ġ"], ["<mask>"]
    letters = "abcdefghijklmnopqrstuvwxyz.,!?0123"
    vocab = {piece: i for i, piece in enumerate([*first, *letters, *last])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")


@pytest.mark.parametrize("name", ["t5_v1.1", "bart", "mbart"])
def test_there_and_back_with_its_tokenizer(name, tmp_path, capsys):
    given = write(tmp_path / "a", name)
    (with_t5 if name.startswith("t5") else with_bart)(tmp_path / "a")
    convert.main([f"--from={tmp_path / 'a'}", f"--to={tmp_path / 'w'}"])
    convert.main([f"--from={tmp_path / 'w'}", f"--to={tmp_path / 'b'}", "--format=hf"])
    said = capsys.readouterr().err
    assert "texts are generated with" not in said and " + " in said
    made = load_file(tmp_path / "b/model.safetensors")
    assert made.keys() == given.keys()
    assert all(made[key].tobytes() == given[key].tobytes() for key in given)
    a, w, b = (open_model(str(tmp_path / n), "--model") for n in "awb")
    assert a.cfg == w.cfg == b.cfg and a.generation == w.generation == b.generation
    ids = {
        "t5_v1.1": (0, 1, (1,), 0),
        "bart": (2, 0, (2,), 1),
        "mbart": (0, 0, (2,), 1),
    }
    assert a.generation[:4] == ids[name]
    assert a.generation.forced_eos_token_id == (None if name == "t5_v1.1" else 2)
    for model in (a, w, b):
        told = model.config.model.family, model.config.objective
        if name == "t5_v1.1":
            assert told == ("t5", "denoise:target=spans")
        else:
            assert told == ("bart", "denoise")
        text = "a walk in 2 parks."
        assert model.tokenizer.encode(text) == a.tokenizer.encode(text)
    around = ([], [1]) if name == "t5_v1.1" else ([0], [2])
    assert special_around(b.tokenizer) == around
    with pytest.raises(
        UserError, match="encoder-decoder, which writes texts and fills"
    ):
        fill_mask.main([f"--model={tmp_path / 'w'}", "a"])


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_tokenizer_with_one_special_token(name, tmp_path):
    """The ids that end a text are in the model's config.json, not the tokenizer."""
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    write(tmp_path / "a", name, **ids, forced_eos_token_id=None)
    with_tokenizer(tmp_path / "a", tokenizer_class="GPT2Tokenizer")
    heard = []
    model = open_model(str(tmp_path / "a"), "--model", heard.append)
    assert {*model.tokenizer.roles.values()} == {0} and not model.tokenizer.has_mask
    bos = GOLDEN[name]["config"].get("bos_token_id", 0)
    assert model.generation == GenerationSettings(0, bos, (1,), 0)
    said = [line for line in heard if "eos_token_id=1" in line]
    assert said[0].endswith(f"the tokenizer's {END} is 0; texts are generated with 1")
    convert.main([f"--from={tmp_path / 'a'}", f"--to={tmp_path / 'b'}", "--format=hf"])
    told = json.loads((tmp_path / "b" / FILE).read_text())
    assert {key: told[key] for key in ids} == ids
    again = open_model(str(tmp_path / "b"), "--model", heard.append)
    assert again.generation == model.generation


def test_t5_tokenizers_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with_t5(tmp_path, extra_ids=6)
    ours = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.vocab_size == len(theirs) and ours.pieces[-1] == "<extra_id_0>"
    assert ours.sentinel_ids.tolist() == [len(theirs) - 1 - i for i in range(6)]
    for text in (*TEXTS, "The <extra_id_0> walks  in <extra_id_1>.", "a</s> b"):
        ids = theirs(text)["input_ids"]
        assert [*ours.encode_with_masks(text), 1] == ids, text
    # As transformers writes it, with only a tokenizer.json.
    theirs.save_pretrained(tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved")
    assert saved.pieces == ours.pieces and saved.roles == ours.roles
    assert special_around(saved) == special_around(ours) == ([], [1])
    # As bertjax writes it.
    write_tokenizer(ours, tmp_path, False, 512, seq2seq="t5")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again(TEXTS[0])["input_ids"] == theirs(TEXTS[0])["input_ids"]
    assert (again.eos_token, again.bos_token) == ("</s>", None)


def test_mbart_needs_a_tokenizer_json(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mbart"}')
    (tmp_path / "sentencepiece.bpe.model").write_bytes(spiece())
    with pytest.raises(UserError, match=r"a tokenizer\.json beside it"):
        load_tokenizer(tmp_path)


def test_what_is_no_vocabulary_of_t5(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with_t5(tmp_path, extra_ids=-1)
    with pytest.raises(UserError, match="extra_ids=-1 is not a number of sentinels"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("is_bare", [None, True, False])
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_what_stands_around_a_text_of_our_own(kind, is_bare, tmp_path):
    """Special tokens are those of training, if known, otherwise those of the family."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    own = load_tokenizer(tmp_path)
    assert special_around(own) is None
    (tmp_path / "hf").mkdir()
    more = {} if is_bare is None else {"has_bare_texts": is_bare}
    write_tokenizer(own, tmp_path / "hf", False, 64, seq2seq=kind, **more)
    before = [] if (kind == "t5" if is_bare is None else is_bare) else [2]
    assert special_around(load_tokenizer(tmp_path / "hf")) == (before, [3])
    told = json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
    assert (told["bos_token"], told["eos_token"]) == ("[CLS]", "[SEP]")
