# SPDX-License-Identifier: Apache-2.0
"""The ids that begin and end generated texts, from transformers' files."""

import json

import pytest

from bertjax import UserError
from bertjax.interop.generation_config import (
    FILE,
    GenerationSettings,
    from_json,
    from_roles,
    read_generation_config,
    write_generation_config,
)

RAW = {"vocab_size": 40, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0}
BART = {**RAW, "decoder_start_token_id": 2, "forced_eos_token_id": 2}


def test_config_json_alone(tmp_path):
    found = read_generation_config(tmp_path, BART, "--model=a")
    assert found == GenerationSettings(2, 0, (2,), 1, None, 2)


def test_the_file_is_before_config_json(tmp_path):
    (tmp_path / FILE).write_text(json.dumps({"eos_token_id": [3, 4]}))
    found = read_generation_config(tmp_path, BART, "x")
    # generation_config.json takes precedence over forced ids in config.json.
    assert found == GenerationSettings(2, 0, (3, 4), 1)


def test_ids_that_are_none(tmp_path):
    raw = {"vocab_size": 40, "eos_token_id": 50256, "pad_token_id": -1}
    assert read_generation_config(tmp_path, raw, "x") == GenerationSettings()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"eos_token_id": "2"}, "eos_token_id='2' is not an id"),
        ({"pad_token_id": True}, "pad_token_id=True is not an id"),
        ({"forced_eos_token_id": [1, 2]}, "more than one is not supported"),
    ],
)
def test_what_is_refused(values, words, tmp_path):
    (tmp_path / FILE).write_text(json.dumps(values))
    with pytest.raises(UserError) as e:
        read_generation_config(tmp_path, RAW, "--model=a")
    said = str(e.value)
    assert said.startswith(f"--model=a: {FILE}: ") and words in said
    assert "\n" not in said


def test_there_and_back(tmp_path):
    for settings in (
        GenerationSettings(0, None, (1,), 0),
        GenerationSettings(2, 0, (2, 5), 1, 0, 2),
    ):
        write_generation_config(tmp_path, settings)
        assert from_json(json.loads((tmp_path / FILE).read_text())) == settings
        assert read_generation_config(tmp_path, {}, "x") == settings


def test_what_follows_from_a_tokenizer():
    roles = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    assert from_roles(roles) == GenerationSettings(None, 2, (3,), 0)
    assert from_roles(roles, "pad").decoder_start_token_id == 0
    told = GenerationSettings(None, 7, forced_bos_token_id=7)
    assert told.filled(from_roles(roles, "sep")) == GenerationSettings(3, 7, (3,), 0, 7)
