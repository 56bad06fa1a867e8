# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: published tokenizations, files of every kind, refusals, training.

testdata/tokenizations.json holds the pieces (and merges) of three published
vocabularies that the cases use; greedy and merge-by-rank splitting agree on them.
"""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from bertjax import UserError
from bertjax.data.tokenizers.add_words import add_words
from bertjax.data.tokenizers.export_tokenizer import write_tokenizer
from bertjax.data.tokenizers.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "testdata/tokenizations.json").read_text("utf-8")
)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, "[unused0]", "hello", "##s", "world", "[", "]", "mask", ".", "ß"]
TEXTS = [
    f"The cat number {i} sat on the mat, and the dogs of Paris sang {i * 7} songs."
    for i in range(200)
]
KINDS = ["unigram", "bpe", "wordpiece", "byte_bpe"]


def write_vocab(directory: Path, pieces: list[str], name: str = "vocab.txt") -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text("\n".join(pieces) + "\n", "utf-8")
    return path


@pytest.fixture
def words(tmp_path) -> Tokenizer:
    return load_tokenizer(write_vocab(tmp_path, WORDS))


@pytest.mark.parametrize("name", ["bert-base-uncased", "bert-base-cased"])
def test_wordpiece_agrees_with_published_tokenizations(name, tmp_path):
    golden = GOLDEN[name]
    tokenizer = load_tokenizer(write_vocab(tmp_path, golden["pieces"]))
    assert tokenizer.lower_case == (name == "bert-base-uncased")
    texts, tokens = zip(*golden["cases"], strict=True)
    found = [[tokenizer.pieces[i] for i in t] for t in tokenizer.encode_batch([*texts])]
    assert found == list(tokens)


@pytest.mark.parametrize("form", ["vocab.txt", "vocab.json"])
def test_byte_bpe_agrees_with_published_tokenizations(form, tmp_path):
    golden = GOLDEN["roberta-bpe"]
    pieces = golden["pieces"]
    merges = ["#version: 0.2", *(" ".join(m) for m in golden["merges"])]
    write_vocab(tmp_path, merges, "merges.txt")
    if form == "vocab.txt":
        write_vocab(tmp_path, pieces)
    else:
        vocab = {p: i for i, p in enumerate(pieces)}
        (tmp_path / form).write_text(json.dumps(vocab))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.kind, tokenizer.mask_token) == ("byte_bpe", "<mask>")
    for text, tokens in golden["cases"]:
        assert [tokenizer.pieces[i] for i in tokenizer.encode(text)] == tokens
    same = [load_tokenizer(tmp_path / n).identity for n in (form, "merges.txt")]
    assert same == [tokenizer.identity] * 2


def test_special_pieces_and_word_starts(words):
    assert words.special_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert words.replacement_ids.tolist() == list(range(6, 14))
    starts = [words.pieces[i] for i in np.flatnonzero(~words.word_starts)]
    assert starts == ["##s"]
    roles = [words.pad_id, words.unk_id, words.cls_id, words.sep_id, words.mask_id]
    assert roles == [0, 1, 2, 3, 4]


def test_written_special_tokens_are_plain_text_but_for_blanks(words):
    pieces = [words.pieces[i] for i in words.encode("Hellos [MASK] [CLS]world")]
    assert pieces == ["hello", "##s", "[", "mask", "]", "[", "[UNK]", "]", "world"]
    ids = words.encode_with_masks("[MASK] hello[MASK].")
    assert [words.pieces[i] for i in ids] == ["[MASK]", "hello", "[MASK]", "."]
    assert words.decode(ids) == "[MASK] hello [MASK] ."


HAN = [*SPECIAL, *"巴黎在2,人々「」。（）", "paris", "##x"]


@pytest.mark.parametrize(
    "text",
    ["巴黎在[MASK]巴黎。", "在paris巴黎,", "paris paris x", "人々「巴黎」", "（2）x巴"],
)
def test_no_space_is_written_beside_chinese_characters(text, tmp_path):
    """WordPiece separates them, and the libraries write 巴 黎 在."""
    han = load_tokenizer(write_vocab(tmp_path, HAN))
    assert han.decode(han.encode_with_masks(text)) == text.replace("x", "[UNK]")


def test_spaces_beside_chinese_characters_stay_where_ids_have_them(tmp_path):
    path = write_vocab(tmp_path, [*SPECIAL, "巴黎", "在"])
    han = load_tokenizer(path)
    library = json.loads(han.engine.tokenizer.to_str())
    library["normalizer"]["handle_chinese_chars"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(library))
    path.unlink()
    spaced = load_tokenizer(tmp_path)
    assert spaced.decode(spaced.encode("巴黎 在 巴黎")) == "巴黎 在 巴黎"


def test_korean_syllables_are_written_whole():
    """Where accents are stripped WordPiece takes them apart, three letters each."""
    texts = ["서울은 한국의 수도이다"]
    korean = train_tokenizer(texts, "wordpiece", 200)
    assert korean.lower_case
    assert korean.decode(korean.encode(texts[0])) == texts[0]


def test_lower_case_is_taken_from_files_then_from_the_pieces(tmp_path):
    path = write_vocab(tmp_path, WORDS)
    assert load_tokenizer(path).lower_case  # ß has no other lower case
    special = write_vocab(tmp_path / "a", [*WORDS, "<S>", "<T>", "[unused1]", "<"])
    assert load_tokenizer(special).lower_case
    assert not load_tokenizer(path, lower_case=False).lower_case
    assert load_tokenizer(path, False).identity != load_tokenizer(path).identity
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert not load_tokenizer(path).lower_case
    assert load_tokenizer(path, lower_case=True).lower_case
    assert not load_tokenizer(write_vocab(tmp_path / "b", [*WORDS, "Ab"])).lower_case


def saved_alike(tokenizer: Tokenizer, directory: Path) -> None:
    tokenizer.save(directory)
    assert load_tokenizer(directory).identity == tokenizer.identity


# How transformers 5.23 encodes "Café 量子 Hello" with these pieces.
ACCENTS = [*SPECIAL, "cafe", "café", "Cafe", "Café", "量", "子", "量子", "hello"]
LOWER = {"do_lower_case": True}


@pytest.mark.parametrize(
    "told, want",
    [
        (LOWER, "cafe 量 子 hello"),
        ({**LOWER, "strip_accents": False}, "café 量 子 hello"),
        ({**LOWER, "tokenize_chinese_chars": False}, "cafe 量子 hello"),
        ({"do_lower_case": False, "strip_accents": True}, "Cafe 量 子 [UNK]"),
        ({"do_lower_case": False, "strip_accents": False}, "Café 量 子 [UNK]"),
    ],
)
@pytest.mark.parametrize("form", ["vocab.txt", "tokenizer.json", "generic"])
def test_options_of_wordpiece(form, told, want, tmp_path):
    """Options of tokenizer_config.json count, except in the class without a family."""
    path = write_vocab(tmp_path / "v", ACCENTS)
    added = {"<ent>": len(ACCENTS)} if form == "vocab.txt" else {}
    path.with_name("added_tokens.json").write_text(json.dumps(added))
    if form != "vocab.txt":
        odd = {**LOWER, "strip_accents": False, "tokenize_chinese_chars": False}
        (tmp_path / "v/tokenizer_config.json").write_text(json.dumps(odd))
        write_tokenizer(load_tokenizer(path), tmp_path / "v", True, 512)
        path = path.with_name("tokenizer.json")
    if form == "generic":
        want = "café 量子 hello"
    kind = "PreTrained" if form == "generic" else "Bert"
    named = {**told, "tokenizer_class": f"{kind}TokenizerFast"}
    path.with_name("tokenizer_config.json").write_text(json.dumps(named))
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("Café 量子 Hello")
    assert [tokenizer.pieces[i] for i in ids] == want.split()
    assert tokenizer.special_ids.tolist() == [*range(5), *added.values()]
    saved_alike(tokenizer, tmp_path / "saved")
    grown = add_words(tokenizer, ["hellocafe"], "--add_words").tokenizer
    assert grown.special_ids.tolist() == tokenizer.special_ids.tolist()
    write_tokenizer(tokenizer, tmp_path / "saved", True, 512)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "saved/tokenizer.json"))
    text = "Café 量子 Hello"
    assert library.encode(text, add_special_tokens=False).ids == ids


@pytest.mark.parametrize("form", ["vocab.json", "tokenizer.json"])
def test_space_before_a_text_of_byte_bpe(form, tmp_path):
    vocab = {p: i for i, p in enumerate([*SPECIAL, "Ġ", "a", "b", "Ġa", "Ġb"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    write_vocab(tmp_path, ["#version: 0.2", "Ġ a", "Ġ b"], "merges.txt")
    config = tmp_path / "tokenizer_config.json"
    plain = load_tokenizer(tmp_path)
    if form == "tokenizer.json":
        write_tokenizer(plain, tmp_path, False, 512)
    config.write_text('{"add_prefix_space": true}')
    tokenizer = load_tokenizer(tmp_path)
    assert plain.encode("a b") == [6, 9] and tokenizer.encode("a b") == [8, 9]
    assert tokenizer.encode(" a b") == [8, 9]
    assert tokenizer.encode_with_masks("a[MASK]b") == [8, 4, 9]
    saved_alike(tokenizer, tmp_path / "saved")
    write_tokenizer(tokenizer, tmp_path / "saved", False, 512)
    told = json.loads((tmp_path / "saved/tokenizer_config.json").read_text())
    assert told["add_prefix_space"]
    assert load_tokenizer(tmp_path / "saved").encode("a b") == [8, 9]
    grown = add_words(tokenizer, ["ab"], "--add_words").tokenizer
    assert grown.pieces[10:] == ["Ġab"] and grown.encode("ab b") == [10, 9]


def test_options_that_are_not_known(tmp_path):
    path = write_vocab(tmp_path, ACCENTS)
    for told in ({"strip_accents": "no"}, {"word_tokenizer_type": "mecab"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
        with pytest.raises(UserError) as e:
            load_tokenizer(path)
        assert f"tokenizer_config.json: {next(iter(told))}" in str(e.value)


def test_line_ends_do_not_belong_to_pieces(tmp_path, words):
    path = tmp_path / "dos.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*WORDS, "", ""]).encode())
    assert load_tokenizer(path).identity == words.identity


def make_json(kind: str) -> str:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    if kind == "wordpiece":
        vocab = {p: i for i, p in enumerate(WORDS)}
        tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:
        pieces = [*SPECIAL, "▁", "▁hello", "▁world", *"[]MASKs."]
        scored = [(p, -float(i)) for i, p in enumerate(dict.fromkeys(pieces))]
        tokenizer = Tokenizer(models.Unigram(scored, unk_id=1))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens([*SPECIAL, "[ENT]"])
    tokenizer.add_tokens(["newword"])
    return tokenizer.to_str()


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_tokenizer_json(kind, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(make_json(kind), "utf-8")
    tokenizer = load_tokenizer(path)
    assert (tokenizer.kind, tokenizer.lower_case) == (kind, kind == "wordpiece")
    ids = tokenizer.encode("hello [MASK] newword [ENT] \0[MASK]")
    assert not set(ids) & (set(tokenizer.special_ids.tolist()) - {tokenizer.unk_id})
    assert "newword" in [tokenizer.pieces[i] for i in ids]
    assert tokenizer.encode_with_masks("hello [MASK]")[-1] == tokenizer.mask_id
    assert tokenizer.vocab_size == len(tokenizer.pieces) == max(ids) + 1
    for number, lower in enumerate([True, False]):
        other = load_tokenizer(path, lower_case=lower)
        assert (other.encode("HELLO") == other.encode("hello")) == lower
        other.save(tmp_path / str(number))
        again = load_tokenizer(tmp_path / str(number))
        assert (again.identity, again.lower_case) == (other.identity, lower)


@pytest.mark.parametrize("kind", KINDS)
def test_training_saving_and_loading(kind, tmp_path):
    tokenizer = train_tokenizer(iter(TEXTS), kind, 400, None, tmp_path / "a")
    assert (tokenizer.kind, tokenizer.lower_case) == (kind, kind != "byte_bpe")
    assert tokenizer.special_ids.tolist() == [0, 1, 2, 3, 4]
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere")
    for other in (load_tokenizer(tmp_path / "elsewhere"), copied(tokenizer)):
        assert other.identity == tokenizer.identity
        assert other.encode_batch(TEXTS[:5]) == tokenizer.encode_batch(TEXTS[:5])
    ids = tokenizer.encode("The cat sat. [MASK] <mask> [CLS] <s>")
    assert not set(ids) & (set(tokenizer.special_ids.tolist()) - {tokenizer.unk_id})
    blank = tokenizer.mask_token
    text = tokenizer.decode(tokenizer.encode_with_masks(f"The cat {blank} on"))
    assert text.lower() == f"the cat {blank} on".lower()


def copied(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.encode("a")
    return pickle.loads(pickle.dumps(tokenizer))


@pytest.mark.parametrize("kind", KINDS)
def test_training_gives_the_same_in_another_process(kind):
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from test_tokenizer import TEXTS, train_tokenizer\n"
        "print(train_tokenizer(TEXTS, sys.argv[1], 400).identity)"
    )
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", code, kind, here]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found.strip() == train_tokenizer(TEXTS, kind, 400).identity


@pytest.mark.parametrize("kind", ["byte_bpe", "unigram"])
def test_a_tokenizer_json_says_whose_the_space_before_a_blank_is(kind, tmp_path):
    """lstrip of its mask decides, as in transformers; without such a file, the mask."""
    tokenizer = train_tokenizer(TEXTS, kind, 400)
    text = f"The cat {tokenizer.mask_token} on"
    write_tokenizer(tokenizer, tmp_path, False, 128)
    assert load_tokenizer(tmp_path).encode_with_masks(text) == (
        tokenizer.encode_with_masks(text)
    )
    file = tmp_path / "tokenizer.json"
    data = json.loads(file.read_text())
    for token in data["added_tokens"]:
        token["lstrip"] = False
    file.write_text(json.dumps(data))
    library = tokenizers.Tokenizer.from_str(json.dumps(data))
    ids = load_tokenizer(tmp_path).encode_with_masks(text)
    assert ids == library.encode(text, add_special_tokens=False).ids
    more = len(ids) - len(tokenizer.encode_with_masks(text))
    assert more == (kind == "byte_bpe")  # SentencePiece drops a final space


ROBERTA = {"config.json": {"model_type": "roberta"}}


def mask_of(lstrip: bool) -> dict:
    return {"content": "<mask>", "lstrip": lstrip, "rstrip": False}


@pytest.mark.parametrize(
    "files, strips",
    [
        ({}, True),  # no class, so not one of transformers'
        (ROBERTA, False),
        ({"tokenizer_config.json": {"tokenizer_class": "RobertaTokenizer"}}, False),
        ({**ROBERTA, "tokenizer_config.json": {"mask_token": mask_of(True)}}, True),
        ({**ROBERTA, "special_tokens_map.json": {"mask_token": mask_of(True)}}, True),
        (
            {
                **ROBERTA,
                "tokenizer_config.json": {"mask_token": mask_of(True)},
                "special_tokens_map.json": {"mask_token": "<mask>"},
            },
            False,
        ),
        (
            {
                **ROBERTA,
                "tokenizer_config.json": {"added_tokens_decoder": {"9": mask_of(True)}},
                "special_tokens_map.json": {"mask_token": mask_of(False)},
            },
            True,
        ),
    ],
)
def test_the_space_before_the_mask_of_vocab_json(files, strips, tmp_path):
    """The expected ids are those of AutoTokenizer in transformers 5.23."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *"Ġab", "Ġa", "Ġb", "<mask>"]
    folder = tmp_path / "v"
    write_vocab(folder, ["#version: 0.2", "Ġ a", "Ġ b"], "merges.txt")
    files = {"vocab.json": {p: i for i, p in enumerate(pieces)}, **files}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    text = "a <mask> b </s>  <mask><mask>a"
    want = {True: [5, 9, 8, 4, 2, 9, 9, 5], False: [5, 4, 9, 8, 4, 2, 4, 4, 9, 9, 5]}
    saved_alike(tokenizer, tmp_path / "saved")
    (tmp_path / "written").mkdir()
    write_tokenizer(tokenizer, tmp_path / "written", False, 128)
    grown = add_words(tokenizer, ["ab"], "--add_words").tokenizer
    for found in (
        tokenizer,
        load_tokenizer(tmp_path / "saved"),
        load_tokenizer(tmp_path / "written"),
        copied(tokenizer),
        grown,
    ):
        assert found.encode_with_masks(text) == want[strips]
    assert tokenizer.encode("a b") == [5, 8]


def test_words_after_a_joint_keep_their_spaces(tmp_path):
    """XLM-R's tokenizer.json splits at spaces and puts "▁" before each word."""
    tokenizer = train_tokenizer(TEXTS, "unigram", 400)
    write_tokenizer(tokenizer, tmp_path, False, 128)
    file = tmp_path / "tokenizer.json"
    data = json.loads(file.read_text())
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
    steps = [{"type": "WhitespaceSplit"}, {**metaspace, "split": True}]
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    file.write_text(json.dumps(data))
    xlmr = load_tokenizer(tmp_path)
    text = "the cat  sat on\tmats "
    whole, after = xlmr.encode(text), xlmr.engine.encode_batch([text], True)[0]
    assert xlmr.engine.decode(after) == "the cat sat on mats"
    assert after == tokenizer.engine.encode_batch(["the cat sat on mats"], True)[0]
    assert whole != after and whole[-3:] == after[-3:]
    ((ids, spans),) = xlmr.engine.encode_spans([text], True)
    assert ids == after and text[slice(*spans[-1])].strip()
    library = tokenizers.Tokenizer.from_str(json.dumps(data))
    for text in ("the [MASK], cat", "Paris[MASK]cat sat", "[MASK] [SEP]on"):
        ids = library.encode(text, add_special_tokens=False).ids
        assert xlmr.encode_with_masks(text) == ids


def test_sentencepiece_goes_on_after_a_blank_without_a_space():
    tokenizer = train_tokenizer(TEXTS, "unigram", 400)
    pieces = [tokenizer.pieces[i] for i in tokenizer.encode_with_masks("[MASK], and")]
    assert pieces[:2] == ["[MASK]", ","]
    assert tokenizer.word_starts[tokenizer.pieces.index(",")]


def test_user_defined_mask_is_not_found_in_text(tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_prefix=str(tmp_path / "m"),
        vocab_size=400,
        hard_vocab_limit=False,
        pad_id=3,
        user_defined_symbols=["[MASK]", "[unused0]", "Paris"],
        minloglevel=2,
    )
    tokenizer = load_tokenizer(tmp_path / "m.model")
    ids = tokenizer.encode("a [MASK] [unused0] Paris")
    assert tokenizer.mask_id not in ids
    assert tokenizer.pieces.index("[unused0]") not in ids
    assert tokenizer.pieces.index("Paris") in ids
    lower = load_tokenizer(tmp_path / "m.model", lower_case=True)
    assert lower.encode("THE CAT") == lower.encode("the cat")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("nosuch.txt", None, ["nosuch.txt"]),
        ("v.bin", b"x", ["v.bin"]),
        ("vocab.txt", b"", ["vocab.txt", "empty"]),
        ("vocab.txt", b"\xef\xbb\xbf\n", ["vocab.txt", "empty"]),
        ("vocab.txt", b"\xff\xfe", ["UTF-8"]),
        ("vocab.txt", "\n".join(w for w in WORDS if w != "[MASK]"), ["[MASK]"]),
        ("vocab.txt", "\n".join(w for w in WORDS if w != "[SEP]"), ["[SEP]"]),
        ("vocab.txt", "\n".join([*WORDS, "hello"]), ["hello", "7", "15"]),
        ("vocab.txt", "[PAD]\n\n[UNK]", ["line 2"]),
        ("m.model", b"not a model", ["m.model", "SentencePiece"]),
        ("m.model", b"", ["empty"]),
        ("tokenizer.json", b"{", ["JSON"]),
        ("tokenizer.json", b"[1]", ["JSON"]),
        ("tokenizer.json", b'{"model": {}}', ["tokenizer.json"]),
        ("vocab.json", b'{"a": 0}', ["merges.txt"]),
        ("merges.txt", b"a b", ["vocab.json"]),
    ],
)
def test_refusals_are_one_line(name, content, words, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as caught:
        load_tokenizer(path)
    message = str(caught.value)
    assert message.startswith(f"data.vocab={path}: ") and "\n" not in message
    assert all(word in message for word in words), message


def test_training_refusals():
    with pytest.raises(UserError, match="vocab_size=20"):
        train_tokenizer(TEXTS, "unigram", 20)
    with pytest.raises(UserError, match="vocab_size=20"):
        train_tokenizer(TEXTS, "wordpiece", 20)
    with pytest.raises(UserError, match="did you mean 'unigram'"):
        train_tokenizer(TEXTS, "unigrm", 400)
    with pytest.raises(UserError, match="no text"):
        train_tokenizer([" "], "unigram", 400)


def test_wordpiece_keeps_the_characters_of_chinese():
    """Each character is a word: there is no "##" piece, and no cap of a thousand."""
    han = [chr(0x4E00 + i) for i in range(3000)]
    texts = ["".join(han[i : i + 50]) for i in range(0, 3000, 10)]
    made = train_tokenizer(texts, "wordpiece", 8000)
    assert set(han) <= set(made.pieces)
    assert not {f"##{c}" for c in han} & set(made.pieces)
    assert made.unk_id not in made.encode("".join(han[::7]))


def test_a_tokenizer_json_without_a_model(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json holds no `model`"):
        load_tokenizer(tmp_path)


def test_offsets_count_characters_of_the_text_as_it_is(tmp_path):
    pieces = [*SPECIAL, "e", "##lan", "istanbul", "i", "##stanbul", "中", "'"]
    tokenizer = load_tokenizer(write_vocab(tmp_path / "w", pieces), lower_case=True)
    text = " E\u0301lan\u00a0İstanbul's  中中"
    ((ids, spans),) = tokenizer.encode_with_offsets([text])
    assert [ids] == tokenizer.encode_batch([text])
    told = [
        (tokenizer.pieces[i], text[a:b]) for i, (a, b) in zip(ids, spans, strict=True)
    ]
    assert told == [
        ("e", "E"),
        ("##lan", "lan"),
        ("istanbul", "İstanbul"),
        ("'", "'"),
        ("[UNK]", "s"),
        ("中", "中"),
        ("中", "中"),
    ]
    assert tokenizer.encode_with_offsets([]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_of_every_kind(kind):
    odd = ["ﬁne ＡＢＣ  İzmir 👍🏽 naïve.", " 北京\u00a0x", ""]
    tokenizer = train_tokenizer([*TEXTS, *odd], kind, 400)
    texts = [*TEXTS[:3], *odd]
    found = tokenizer.encode_with_offsets(texts)
    assert [ids for ids, _ in found] == tokenizer.encode_batch(texts)
    for text, (_, spans) in zip(texts, found, strict=True):
        covered = {at for a, b in spans for at in range(a, b)}
        assert covered >= {at for at, c in enumerate(text) if not c.isspace()}
        assert all(0 <= a <= b <= len(text) for a, b in spans)
        assert spans == sorted(spans)


def test_ids_of_added_tokens_json_are_whole_numbers(tmp_path):
    path = write_vocab(tmp_path, WORDS)
    for value in (1.5, "3", None, 10**9):
        (tmp_path / "added_tokens.json").write_text(json.dumps({"<ent>": value}))
        with pytest.raises(UserError, match=r"added_tokens\.json: '<ent>' cannot have"):
            load_tokenizer(path)
