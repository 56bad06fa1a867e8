# SPDX-License-Identifier: Apache-2.0
"""Sentinels after vocabularies of every kind."""

import json

import numpy as np
import pytest

from bertjax.data.tokenizers.export_tokenizer import make_json
from bertjax.data.tokenizers.extra_ids import add_extra_ids
from bertjax.data.tokenizers.tokenizer import load_tokenizer, train_tokenizer

KINDS = "unigram", "bpe", "wordpiece", "byte_bpe", "ids", "json"
TEXTS = ["The cat sat. On the mat? Yes!", 'a cat; the mat, "sat." <extra_id_0>'] * 40


def make(kind, folder):
    if kind == "ids":
        return load_tokenizer("ids:12")
    if kind == "json":
        data = make_json(train_tokenizer(TEXTS, "unigram", 60), token_types=False)
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(data))
        return load_tokenizer(folder)
    return train_tokenizer(TEXTS, kind, {"byte_bpe": 300}.get(kind, 80))


@pytest.mark.parametrize("kind", KINDS)
def test_sentinels_are_the_last_pieces_and_in_no_text(kind, tmp_path):
    tokenizer = make(kind, tmp_path / "json")
    assert not len(tokenizer.sentinel_ids)
    n = tokenizer.vocab_size
    more = add_extra_ids(tokenizer, 3)
    assert more.pieces == [*tokenizer.pieces, *(f"<extra_id_{i}>" for i in (2, 1, 0))]
    assert more.sentinel_ids.tolist() == [n + 2, n + 1, n]
    assert more.roles == tokenizer.roles and more.lower_case == tokenizer.lower_case
    assert set(more.special_ids) == {*tokenizer.special_ids, n, n + 1, n + 2}
    assert (more.replacement_ids == tokenizer.replacement_ids).all()
    assert more.identity != tokenizer.identity
    texts = ["3 7"] if kind == "ids" else TEXTS[:2]
    assert more.encode_batch(texts) == tokenizer.encode_batch(texts)
    assert max(i for ids in more.encode_batch(texts) for i in ids) < n
    assert more.decode([n + 2]) == "<extra_id_0>"
    # Existing sentinels stay, and a saved tokenizer has them.
    assert add_extra_ids(more, 100) is more and add_extra_ids(tokenizer, 0) is tokenizer
    more.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.identity == more.identity
    assert (again.sentinel_ids == more.sentinel_ids).all()


@pytest.mark.parametrize("kind", ["unigram", "wordpiece", "byte_bpe", "ids"])
def test_pieces_that_end_sentences(kind, tmp_path):
    tokenizer = make(kind, tmp_path)
    ends = {tokenizer.pieces[i] for i in np.flatnonzero(tokenizer.sentence_ends)}
    if kind == "ids":
        assert not ends
        return
    assert {".", "?", "!"} <= {piece[-1] for piece in ends}
    assert not any(piece[-1].isalpha() or piece[-1] in ';,>"' for piece in ends)
