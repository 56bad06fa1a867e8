# SPDX-License-Identifier: Apache-2.0
"""tokenizer.json files of others: odd contents are reported and do no harm."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import KINDS, make_json

from bertjax import UserError
from bertjax.data.tokenizers.backends import TextError, encode_texts
from bertjax.data.tokenizers.tokenizer import load_tokenizer


def plain_json() -> dict:
    return json.loads(make_json("wordpiece"))


def replacing(pattern: dict, content: str, times: int, name: str = "normalizers"):
    step = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", name: [step] * times}


def added(**told) -> dict:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": 99, "content": "x", "special": True, **flags, **told}


ODD_JSON = {
    "9.3 GB": (("model", "vocab", "far"), 10**9, "'far' is 1000000000, of 17 pieces"),
    "more": (("model", "vocab", "far"), 10**11, "the id of 'far' is 100000000000"),
    "twice": (("model", "vocab", "far"), 6, "'far' and 'hello' have the same id, 6"),
    "float": (("model", "vocab", "far"), 99.0, "'far' is 99.0, not a whole number"),
    "below": (("model", "vocab", "far"), -1, "'far' is -1, not a whole number"),
    "no list": (("added_tokens",), {"x": 1}, "`added_tokens` is not a list"),
    "no text": (("added_tokens",), [added(content="")], "token of id 99 has no text"),
    "other id": (
        ("added_tokens",),
        [added(content="hello")],
        "'hello' has the id 99, and in the vocabulary the id 6",
    ),
    "growth": (
        ("normalizer",),
        replacing({"String": "a"}, "a" * 10, 9),
        "its normalizer makes 'a' over 100 times as long",
    ),
    "growth at the start": (
        ("normalizer",),
        {"type": "Prepend", "prepend": "a" * 10**6},
        "its normalizer makes ' ' over 100 times as long",
    ),
    "growth by nothing": (
        ("normalizer",),
        replacing({"Regex": "(?=b)"}, "b", 40),
        "its normalizer makes '(?=b)' over 100 times as long",
    ),
    "growth of texts": (
        ("decoder",),
        replacing({"String": "mask"}, "mask" * 10, 9, "decoders"),
        "its decoder makes 'mask' over 100 times as long",
    ),
    "types": (("normalizer",), [3], "a part of it has the wrong type"),
}


@pytest.mark.parametrize("name", ODD_JSON)
def test_odd_parts_of_a_tokenizer_json_are_named(name, tmp_path):
    keys, value, words = ODD_JSON[name]
    data = plain_json()
    place = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(UserError) as caught:
        load_tokenizer(tmp_path)
    told = str(caught.value)
    assert told.startswith(f"data.vocab={tmp_path}: tokenizer.json") and words in told


def test_steps_that_make_texts_little_longer_are_taken(tmp_path):
    data = plain_json()
    steps = replacing({"Regex": r"(\d)|[,.]"}, " # ", 4)["normalizers"]
    data["normalizer"] = {
        "type": "Sequence",
        "normalizers": [*steps, {"type": "Lowercase"}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert load_tokenizer(tmp_path).encode("hello") == [6]


PLACES = [
    *((key,) for key in plain_json()),
    *(("model", key) for key in plain_json()["model"]),
    *(("added_tokens", 0, key) for key in plain_json()["added_tokens"][0]),
    ("added_tokens", 0),
    ("model", "vocab", "hello"),
    ("normalizer", "type"),
    ("pre_tokenizer", "type"),
]
VALUES = [None, True, -1, 0, 1.5, 10**9, 1e300, "", "x", [], [1], {}, {"x": 1}]
VALUES += [[[]], ["x", 1], {"type": "Sequence"}, {"type": "Sequence", "normalizers": 3}]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PLACES), st.sampled_from(VALUES), st.sampled_from(KINDS[::2]))
def test_any_type_anywhere_is_taken_or_refused_in_a_line(place, value, kind):
    data = json.loads(make_json(kind))
    parent = data
    try:
        for key in place[:-1]:
            parent = parent[key]
        parent[place[-1]] = value
    except TypeError:  # the place belongs to another kind of vocabulary
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        file.write_text(json.dumps(data))
        try:
            tokenizer = load_tokenizer(file)
        except UserError as error:
            assert "\n" not in str(error)
        else:
            text = "hello world. [MASK]"
            for ids in (tokenizer.encode(text), tokenizer.encode_with_masks(text)):
                assert max(ids, default=0) < tokenizer.vocab_size


BACKTRACKING = {"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": ""}


@pytest.mark.parametrize("form", ["normalizer", "pre_tokenizer"])
def test_a_text_at_which_the_library_gives_up_is_named(form, tmp_path):
    """PanicException is no Exception; Ctrl-C must still work."""
    data = plain_json()
    if form == "pre_tokenizer":
        step = {"pattern": BACKTRACKING["pattern"], "behavior": "Isolated"}
        data[form] = {"type": "Split", "invert": False, **step}
    else:
        data[form] = BACKTRACKING
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = load_tokenizer(tmp_path)
    bad = "x" * 60
    for encode in (
        tokenizer.encode_batch,
        tokenizer.encode_with_offsets,
        lambda texts: tokenizer.encode_with_masks(texts[1]),
    ):
        with pytest.raises(TextError) as caught:
            encode(["hello", bad])
        assert f"data.vocab: its tokenizer cannot split {bad!r} (" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert tokenizer.encode("hello") == [6]

    def interrupted(texts, **options):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_texts(interrupted, ["hello"])
