# SPDX-License-Identifier: Apache-2.0
"""Append T5's sentinels to a vocabulary that has none."""

import json

from bertjax.data.tokenizers.tokenizer import SENTINEL, Tokenizer
from bertjax.data.tokenizers.tokenizer_files import ADDED, Reader
from bertjax.data.tokenizers.tokenizer_json import LSTRIP, json_files, special_tokens


def add_extra_ids(tokenizer: Tokenizer, number: int) -> Tokenizer:
    """Return the tokenizer with `number` sentinels, of which <extra_id_0> is the last.

    They are special and occur in no text. A tokenizer that has sentinels is returned
    unchanged, and so is any tokenizer if `number` is 0. (transformers' T5Tokenizer,
    extra_ids.)

    Worked example, three sentinels after the pieces a and b:

        pieces   a  b  <extra_id_2>  <extra_id_1>  <extra_id_0>
    """
    if not number or len(tokenizer.sentinel_ids):
        return tokenizer
    first = tokenizer.vocab_size
    new = {SENTINEL.format(number - 1 - i): first + i for i in range(number)}
    files = dict(tokenizer.files)
    if "tokenizer.json" in files:
        data = json.loads(files["tokenizer.json"])
        known = data.get("added_tokens") or []
        data["added_tokens"] = known + special_tokens(new)
        files |= json_files(data)
    else:
        known = json.loads(files.get(ADDED, b"{}"))
        files[ADDED] = json.dumps(known | new).encode()
    reader = Reader(f"data.extra_ids={number}", tokenizer.lower_case)
    options = {**tokenizer.config(), LSTRIP: tokenizer.mask_lstrip}
    return Tokenizer(**reader.make(files, options))
