# SPDX-License-Identifier: Apache-2.0
"""transformers' AutoTokenizer opens the tokenizers that we write, with the same ids."""

import pytest

from bertjax.data.tokenizers.export_tokenizer import write_tokenizer
from bertjax.data.tokenizers.tokenizer import train_tokenizer

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", ["unigram", "bpe", "wordpiece", "byte_bpe"])
def test_a_tokenizer_that_we_trained(kind, corpus, tmp_path):
    lines = (corpus / "train.txt").read_text("utf-8").splitlines()
    ours = train_tokenizer(filter(None, lines), kind, 700)
    write_tokenizer(ours, tmp_path, True, 128)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.model_max_length == 128
    texts = [x for x in lines if x and "[" not in x and "<" not in x][:300]
    texts += ["", "  two  spaces ", "naïve café", "東京 and Zürich", "a\u200bb"]
    plain = theirs(texts, add_special_tokens=False)["input_ids"]
    assert plain == ours.encode_batch(texts)
    blank = f"The value of {ours.mask_token} is a list."
    ids = [ours.cls_id, *ours.encode_with_masks(blank), ours.sep_id]
    assert theirs(blank)["input_ids"] == ids
    assert theirs.mask_token_id == ours.mask_id and ours.mask_id in ids
    pair = theirs("a list", "of names")
    first, second = ours.encode_batch(["a list", "of names"])
    kinds = [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert pair["token_type_ids"] == kinds
    want = [ours.cls_id, *first, ours.sep_id, *second, ours.sep_id]
    assert pair["input_ids"] == want
