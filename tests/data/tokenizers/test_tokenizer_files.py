# SPDX-License-Identifier: Apache-2.0
"""GPT-2's files: one special token has all five roles; other files have no such."""

import json

import pytest
from test_export_tokenizer import ODD

from bertjax import UserError
from bertjax.data.tokenizers import add_words
from bertjax.data.tokenizers.export_tokenizer import make_json, write_tokenizer
from bertjax.data.tokenizers.tokenizer import load_tokenizer, train_tokenizer

END = "<|endoftext|>"
TEXTS = [
    *ODD,
    "Hello world",
    " Hello  world ",
    "don't we'll I'VE 3's",
    "line\n\n\tnext\r\n",
    "[MASK] <s> </s> <pad>",
    "🤗👩‍👩‍👧 x²",
]
NAMES = {"config.json": {"model_type": "gpt2"}}
CLASS = {"tokenizer_config.json": {"tokenizer_class": "GPT2TokenizerFast"}}


@pytest.fixture(scope="module")
def files(corpus, tmp_path_factory):
    """Return small vocab.json and merges.txt like GPT-2's, without a stated class."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("gpt2")
    library = ByteLevelBPETokenizer()
    library.train([str(corpus / "train.txt")], 400, special_tokens=[END])
    library.save_model(str(folder))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write(folder, files, more=None):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for name, content in (more or {}).items():
        (folder / name).write_text(json.dumps(content))
    return folder


def theirs(folder, **options):
    transformers = pytest.importorskip("transformers")
    names = {"vocab": "vocab.json", "merges": "merges.txt"}
    paths = {key: str(folder / name) for key, name in names.items()}
    return transformers.GPT2Tokenizer(**paths, **options)


@pytest.mark.parametrize("more", [NAMES, CLASS], ids=["model_type", "class"])
def test_one_token_has_all_roles(files, more, tmp_path):
    ours = load_tokenizer(write(tmp_path, files, more))
    assert ours.kind == "byte_bpe" and not ours.lower_case and not ours.has_mask
    assert set(ours.roles.values()) == {0} and ours.pieces[0] == END
    assert ours.special_ids.tolist() == [0] and 0 not in ours.replacement_ids
    assert ours.encode(f"a{END}").count(0) == 0  # plain text when written in a text
    assert ours.encode_with_masks(f"a {END}b").count(0) == 1
    ours.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").identity == ours.identity


@pytest.mark.parametrize("form", ["files", "tokenizer.json"])
@pytest.mark.parametrize("prefix", [False, True, None])
def test_ids_are_those_of_transformers(files, form, prefix, tmp_path):
    given = {} if prefix is None else {"add_prefix_space": prefix}
    folder = write(tmp_path / "a", files)
    reference = theirs(folder, **given)
    if form == "files":
        config = {"tokenizer_class": "GPT2Tokenizer", **given}
        write(folder, files, {"tokenizer_config.json": config})
    else:
        reference.save_pretrained(folder := tmp_path / "b")
        assert {"tokenizer.json"} < {path.name for path in folder.iterdir()}
    ours = load_tokenizer(folder)
    assert set(ours.roles.values()) == {0}
    for text in TEXTS:
        assert ours.encode(text) == reference(text)["input_ids"], text
        assert ours.decode(ours.encode(text)) == text.strip() or prefix
    blanks = f"one{END} two{END}"
    assert ours.encode_with_masks(blanks) == reference(blanks)["input_ids"]


def test_tokens_of_its_own_come_first(files, tmp_path):
    vocab = json.loads(files["vocab.json"])
    added = {"<start>": len(vocab), "[PAD]": len(vocab) + 1}
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": {"content": "<start>", "lstrip": False},
        "eos_token": "e",
    }
    more = {"added_tokens.json": added, "tokenizer_config.json": config}
    ours = load_tokenizer(write(tmp_path, files, more))
    tokens = {role: ours.pieces[i] for role, i in ours.roles.items()}
    wanted = {"pad": "[PAD]", "unk": "e", "cls": "<start>", "sep": "e", "mask": "e"}
    assert tokens == wanted and not ours.has_mask


@pytest.mark.parametrize(
    "more",
    [{}, {"config.json": {"model_type": "roberta"}}, {"tokenizer_config.json": {}}],
)
def test_other_files_are_refused(files, more, tmp_path):
    folder = write(tmp_path, files, more)
    with pytest.raises(UserError, match="has no mask token") as e:
        load_tokenizer(folder)
    assert '"tokenizer_class": "GPT2Tokenizer"' in str(e.value)
    assert "\n" not in str(e.value)


def test_a_vocabulary_of_our_own_has_a_mask(corpus):
    lines = (corpus / "train.txt").read_text("utf-8").splitlines()[:200]
    assert train_tokenizer(lines, "wordpiece", 300).has_mask


def test_prompts_stay_open(files, corpus, tmp_path):
    """A causal model's texts are prompts: no special token ends them."""
    transformers = pytest.importorskip("transformers")
    lines = (corpus / "train.txt").read_text("utf-8").splitlines()[:300]
    trained = train_tokenizer(lines, "byte_bpe", 400)
    gpt2 = load_tokenizer(write(tmp_path / "gpt2", files, CLASS))
    for name, ours in {"trained": trained, "gpt2": gpt2}.items():
        folder = tmp_path / f"{name}.out"
        folder.mkdir()
        write_tokenizer(ours, folder, False, 64, causal="gpt2")
        opened = transformers.AutoTokenizer.from_pretrained(folder)
        first = [ours.cls_id] if ours.has_mask else []
        one, two = ours.encode_batch(["a list", "of names"])
        assert opened("a list")["input_ids"] == [*first, *one]
        assert opened("a list", "of names")["input_ids"] == [*first, *one, *two]
        ids = opened.bos_token_id, opened.eos_token_id, opened.pad_token_id
        assert ids == (ours.cls_id, ours.sep_id, ours.pad_id)
        assert (opened.mask_token is not None) == ours.has_mask
    closed = make_json(trained, False)["post_processor"]["single"]
    assert len(closed) == 3  # as for any other model


def test_words_are_added(files, tmp_path):
    ours = load_tokenizer(write(tmp_path, files, CLASS))
    grown = add_words.add_words(ours, ["quux"], "--add_words=x").tokenizer
    assert ours.vocab_size == 400
    assert grown.encode("quux quux") == [401, 400]
    assert grown.roles == ours.roles and grown.encode("a list") == ours.encode("a list")
