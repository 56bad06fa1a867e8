# SPDX-License-Identifier: Apache-2.0
"""Vocabularies without text, in which each token is an integer or a name.

`data.vocab="ids:N"`: lines of integers from 0 to N - 1 (items, log keys, codes), or
JSON lists of them. `data.vocab="ids:FILE"`: FILE has one name per line, and texts are
names separated by spaces; if every name is one character (amino acids), spaces are
optional. The special pieces come first: the number 0 has the id 5.
"""

import json
import re
from pathlib import Path

from bertjax import UserError
from bertjax.data.tokenizers.backends import TextError
from bertjax.data.tokenizers.vocab_files import read_lines
from bertjax.storage.paths import expand

FILE = "ids.json"  # {"count": N} or {"names": [...]}, the file of a saved tokenizer
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MOST = 1 << 27
_INTEGERS = re.compile(r"(?:[0-9]{1,18}(?![0-9])|\s)*")


def read(value: str, key: str = "data.vocab") -> bytes:
    """Read "ids:N" or "ids:FILE" into the content of ids.json.

    Raises UserError if N is out of range, if FILE cannot be read or is empty, and if a
    name is empty, has a space, is repeated or is a special piece.

    >>> read("ids:20")
    b'{"count": 20}'
    """

    def refuse(why: str) -> UserError:
        return UserError(f"{key}={value}: {why}")

    given = value.removeprefix("ids:")
    if re.fullmatch(r"\d+", given, re.ASCII):
        if not 0 < int(given) <= MOST:
            raise refuse(f"the number of ids is 1 to {MOST:,}")
        return json.dumps({"count": int(given)}).encode()
    if not expand(given, key).exists():
        raise refuse("neither a number nor a file")
    names = read_lines(Path(given), f"{key}={value}")
    seen = dict.fromkeys(SPECIAL, 0)
    for number, name in enumerate(names, 1):
        if name.split() != [name]:
            raise refuse(f"line {number}: {name!r} is not one word")
        if name in seen:
            other = f"of line {seen[name]}" if seen[name] else "of a special piece"
            raise refuse(f"line {number}: {name!r} is the name {other} too")
        seen[name] = number
    return json.dumps({"names": names}, ensure_ascii=False).encode()


def pieces(content: bytes) -> list[str]:
    """Return all pieces of an ids.json.

    >>> pieces(b'{"count": 2}')
    ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '0', '1']
    """
    data = json.loads(content)
    names = data["names"] if "names" in data else map(str, range(data["count"]))
    return [*SPECIAL, *names]


class IdsEngine:
    """Converts words to ids (a `backends.Engine`)."""

    def __init__(self, every: list[str], unk: int, content: bytes) -> None:
        self.names = every
        self.unk = unk
        self.count = json.loads(content).get("count")
        known = [] if self.count else every[len(SPECIAL) :]
        self.ids = {name: i for i, name in enumerate(known, len(SPECIAL))}
        # Without spaces each character is a word.
        self.single = bool(known) and all(len(name) == 1 for name in known)
        self.word = re.compile(r"\S" if self.single else r"\S+")

    def encode_batch(self, texts: list[str], after: bool = False) -> list[list[int]]:
        """Return the ids of each text; `after` has no effect.

        An unknown name becomes [UNK]. Raises UserError for anything that is not an
        integer below N, if the vocabulary is one of integers.
        """
        if self.count:
            return [self._integers(text) for text in texts]
        return [
            [self.ids.get(word, self.unk) for word in self.word.findall(text)]
            for text in texts
        ]

    def _integers(self, text: str) -> list[int]:
        if _INTEGERS.fullmatch(text):
            values = list(map(int, text.split()))
            if not values or max(values) < self.count:
                return [value + len(SPECIAL) for value in values]
            bad = str(next(value for value in values if value >= self.count))
        else:
            bad = next(w for w in text.split() if not _INTEGERS.fullmatch(w))
        raise TextError(
            f"data.vocab=ids:{self.count}: {bad[:40]!r} in the text is not an integer "
            f"from 0 to {self.count - 1}"
        )

    def encode_spans(
        self, texts: list[str], after: bool = False
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        encoded = self.encode_batch(texts)
        return [
            (ids, [word.span() for word in self.word.finditer(text)])
            for ids, text in zip(encoded, texts, strict=True)
        ]

    def decode(self, ids: list[int]) -> str:
        return ("" if self.single else " ").join(self.names[i] for i in ids)
