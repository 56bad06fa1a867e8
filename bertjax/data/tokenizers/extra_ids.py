# SPDX-License-Identifier: Apache-2.0
"""Put T5's sentinels behind a vocabulary that has none."""

import json

from bertjax.data.tokenizers.tokenizer import SENTINEL, Tokenizer
from bertjax.data.tokenizers.tokenizer_files import ADDED, Reader
from bertjax.data.tokenizers.tokenizer_json import LSTRIP, json_files, special_tokens


def add_extra_ids(tokenizer: Tokenizer, number: int) -> Tokenizer:
    """Return the tokenizer with `number` sentinels, <extra_id_0> being its last piece.

    They are special, and no text has them. One that has sentinels is returned as it is,
    and so is any with number 0. (transformers' T5Tokenizer, extra_ids.)

    Three behind the pieces a and b:

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
