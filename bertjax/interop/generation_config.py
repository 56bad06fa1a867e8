# SPDX-License-Identifier: Apache-2.0
"""Read and write generation_config.json: ids that begin, end and pad generated texts.

Its keys, and the meaning of absent ones, are those of transformers,
generation/configuration_utils.py and GenerationMixin._prepare_special_tokens in
generation/utils.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bertjax import UserError
from bertjax.interop import read_tensors

FILE = "generation_config.json"


class GenerationSettings(NamedTuple):
    """Settings named as in generation_config.json; None or () if absent.

    decoder_start_token_id: the first input of an encoder-decoder's decoder.
    eos_token_id: each of these ids ends a text. forced_bos_token_id: always the first
    generated id; forced_eos_token_id: always the last one at the maximum length.
    """

    decoder_start_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None

    def to_json(self) -> dict[str, int | list[int]]:
        """Return the present settings for JSON; eos_token_id is one id or a list.

        >>> GenerationSettings(0, eos_token_id=(1,)).to_json()
        {'decoder_start_token_id': 0, 'eos_token_id': 1}
        """
        ends = self.eos_token_id
        values = {**self._asdict(), "eos_token_id": ends[0] if len(ends) == 1 else ends}
        absent = (None, ())
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in values.items()
            if value not in absent
        }

    def filled(self, defaults: "GenerationSettings") -> "GenerationSettings":
        """Return the settings with absent ones taken from `defaults`.

        Forced ids have no default.
        """
        forced = ("forced_bos_token_id", "forced_eos_token_id")
        given = {
            key: getattr(defaults, key)
            for key, value in self._asdict().items()
            if value in (None, ()) and key not in forced
        }
        return self._replace(**given)


def from_json(values: Mapping[str, Any], where: str = "") -> GenerationSettings:
    """Read the result of `GenerationSettings.to_json`, or transformers' file.

    where: begins messages. An id below 0 counts as absent, as in some files. Raises
    UserError for values that are not ids.

    >>> from_json({"eos_token_id": [1, 5], "bos_token_id": -1}).eos_token_id
    (1, 5)
    """
    found: dict[str, Any] = {}
    for key in GenerationSettings._fields:
        value = values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(i) is not int for i in ids):
            raise UserError(f"{where}: {key}={value!r} is not an id")
        ids = [i for i in ids if i >= 0]
        if key == "eos_token_id":
            found[key] = tuple(ids)
        elif len(ids) > 1:
            raise UserError(f"{where}: {key}={value!r}: more than one is not supported")
        else:
            found[key] = ids[0] if ids else None
    return GenerationSettings(**found)


def from_roles(roles: Mapping[str, int], decoder_start: str = "") -> GenerationSettings:
    """Return the settings that follow from a tokenizer's special pieces.

    decoder_start: the role of the decoder's first piece (family.py).
    """
    start = roles[decoder_start] if decoder_start else None
    return GenerationSettings(start, roles["cls"], (roles["sep"],), roles["pad"])


def read_generation_config(
    directory: Path, raw: Mapping[str, Any], where: str
) -> GenerationSettings:
    """Read a directory's generation_config.json, or without one its config.json, `raw`.

    Ids that the file lacks are taken from config.json, except forced ones; transformers
    5 does the same, and has no default for a decoder's first id. Ids beyond the
    vocabulary count as absent: config.json files of small models keep those of a large
    one. Raises UserError, with a line that begins with `where`.
    """
    given = from_json(raw, f"{where}: config.json")
    if (directory / FILE).exists():
        path = read_tensors.inside(directory, FILE, where)
        own = from_json(read_tensors.read_json(path, where), f"{where}: {FILE}")
        given = own.filled(given)
    rows = raw.get("vocab_size")
    if type(rows) is not int:
        return given
    within: dict[str, Any] = {
        key: None if value is not None and value >= rows else value
        for key, value in given._asdict().items()
        if key != "eos_token_id"
    }
    ends = tuple(i for i in given.eos_token_id if i < rows)
    return GenerationSettings(**within, eos_token_id=ends)


def write_generation_config(directory: Path, settings: GenerationSettings) -> None:
    """Write generation_config.json in transformers' format."""
    text = json.dumps(settings.to_json(), indent=2, sort_keys=True) + "\n"
    (directory / FILE).write_text(text, "utf-8")
