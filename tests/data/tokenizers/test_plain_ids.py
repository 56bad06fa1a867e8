# SPDX-License-Identifier: Apache-2.0
"""Vocabularies of integers and names."""

import pickle

import pytest

from bertjax import UserError
from bertjax.data.tokenizers.tokenizer import load_tokenizer
from bertjax.data.tokenizers.word_starts import make_marker


def test_integers(tmp_path):
    tokenizer = load_tokenizer("ids:1000")
    assert (tokenizer.kind, tokenizer.vocab_size) == ("ids", 1005)
    assert not tokenizer.has_sentences and not tokenizer.lower_case
    assert tokenizer.special_ids.tolist() == [0, 1, 2, 3, 4]
    assert tokenizer.pieces[:6] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "0"]
    assert tokenizer.word_starts.all()
    assert tokenizer.encode_batch(["0 999  7", ""]) == [[5, 1004, 12], []]
    assert tokenizer.decode([2, 5, 1004, 3]) == "[CLS] 0 999 [SEP]"
    assert tokenizer.encode_with_masks("3 [MASK] 5") == [8, 4, 10]
    tokenizer.save(tmp_path / "a")
    for other in (
        load_tokenizer(tmp_path / "a"),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert other.identity == tokenizer.identity
        assert other.encode("12 0") == [17, 5] and not other.has_sentences
    assert load_tokenizer("ids:1001").identity != tokenizer.identity
    assert load_tokenizer("ids:1000", lower_case=False).identity == tokenizer.identity
    assert make_marker(tokenizer) is None
    marker = make_marker(tokenizer, entities=True)
    ((ids, marks),) = marker.encode(["1 23 4 2 3"], [True], ("23 4", "2"))
    assert ids == [6, 28, 9, 7, 8] and marks.tolist() == [1, 7, 3, 7, 1]


@pytest.mark.parametrize(
    "bad", ["1000", "-1", "1.5", "x", "1_0", "+1", "٣", "[MASK]", "9" * 5000]
)
def test_what_is_no_id_is_refused(bad):
    tokenizer = load_tokenizer("ids:1000")
    with pytest.raises(UserError, match=r"data.vocab=ids:1000: .*0 to 999") as caught:
        tokenizer.encode(f"1 {bad} 2")
    assert bad[:40] in str(caught.value)


def test_names(tmp_path):
    path = tmp_path / "words.txt"
    path.write_bytes("\ufefflogin\r\nlog.out\nüber\n[unused1]\n\n".encode())
    tokenizer = load_tokenizer(f"ids:{path}")
    assert tokenizer.encode("log.out login  Login [unused1] .") == [6, 5, 1, 8, 1]
    assert tokenizer.decode([6, 7, 4]) == "log.out über [MASK]"
    assert tokenizer.replacement_ids.tolist() == [5, 6, 7, 8]
    tokenizer.save(tmp_path / "a")
    assert load_tokenizer(tmp_path / "a").identity == tokenizer.identity
    path.write_text("\n".join("ACDEF"))
    proteins = load_tokenizer(f"ids:{path}")
    assert proteins.encode("FACX A") == [9, 5, 6, 1, 5]
    assert proteins.decode([9, 5, 6]) == "FAC"
    assert proteins.identity != tokenizer.identity


def test_refusals(tmp_path):
    for name, content in {
        "empty": "\n",
        "space": "a\nb c",
        "gap": "a\n\nb",
        "twice": "a\nb\na",
        "special": "[SEP]",
    }.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "bytes").write_bytes(b"a\n\xff")
    for value, words in {
        "ids:0": "1 to",
        "ids:99999999999": "1 to",
        "ids:": "",
        f"ids:{tmp_path}/none": "neither a number nor a file",
        f"ids:{tmp_path}/empty": "empty",
        f"ids:{tmp_path}/space": "line 2: 'b c' is not one word",
        f"ids:{tmp_path}/gap": "line 2: '' is not one word",
        f"ids:{tmp_path}/twice": "line 3: 'a' is the name of line 1 too",
        f"ids:{tmp_path}/special": "line 1: .*special",
        f"ids:{tmp_path}/bytes": "not UTF-8",
    }.items():
        with pytest.raises(UserError, match=f"data.vocab={value}: .*{words}") as caught:
            load_tokenizer(value)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"data.lower_case=True"):
        load_tokenizer("ids:9", lower_case=True)
