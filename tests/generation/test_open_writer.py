# SPDX-License-Identifier: Apache-2.0
"""Which models can generate texts, and which are refused in one line."""

import dataclasses
from types import SimpleNamespace

import pytest

from bertjax import UserError
from bertjax.assembly.models import LoadedModel
from bertjax.config.schema import base
from bertjax.generation.open_writer import (
    encode_lines,
    find_side,
    open_dialogue,
    pick_how,
)
from bertjax.generation.options import Options
from bertjax.generation.texts import make_rows
from bertjax.models.config import EncoderConfig

CFG = EncoderConfig(
    30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
)


@pytest.mark.parametrize(
    "other",
    [
        {"position_embedding_type": "rope"},
        {"position_embedding_type": "none", "relative_attention_num_buckets": 8},
        {"local_attention": 8},
    ],
)
def test_models_of_answers_without_a_table_of_positions_are_refused(other):
    """Formerly they ended in a ValueError at the first answer."""
    opened = SimpleNamespace(checkpoint="runs/chat")
    with pytest.raises(UserError, match="runs/chat writes no answers"):
        open_dialogue(opened, ({}, dataclasses.replace(CFG, **other)))


@pytest.mark.parametrize("family", ["t5", "bart", "roberta"])
@pytest.mark.parametrize("objective", ["denoise", "denoise:target=spans,z_loss=1e-4"])
def test_an_encoder_decoder_reads_and_writes_rows_as_it_learnt_them(family, objective):
    """The objective decides, not only the family. Formerly a model of T5's shape began
    whole texts with padding, and one of RoBERTa's shape was refused."""
    config = base()
    config.objective, config.model.family = objective, family
    roles = {"pad": 0, "cls": 2, "sep": 3}
    ids = {f"{name}_id": id_ for name, id_ in roles.items()}
    tokenizer = SimpleNamespace(roles=roles, files={}, **ids)
    opened = LoadedModel(config, tokenizer, "runs/a", {})
    start, side = opened.generation.decoder_start_token_id, find_side(opened)
    if objective == "denoise":
        assert (start, side) == (3, ((2,), (3,)))
    else:
        assert (start, side) == (0, ((), (3,)))
    theirs = opened._replace(meta={"hf": {"model_type": "t5"}})
    assert theirs.generation.decoder_start_token_id == 0


def test_a_model_that_answers_out_of_passages_needs_some():
    """Formerly the message requested prompts with passages, which were then refused."""
    opened = SimpleNamespace(config=SimpleNamespace(objective="rag"), meta={"task": {}})
    with pytest.raises(UserError, match=r"runs/rag was .* --index=DIR finds them"):
        pick_how(opened, Options(), "runs/rag")


def test_code_is_asked_line_by_line_as_it_was_learnt():
    """Line ends and leading blanks are removed, as training texts do not have them."""
    tokenizer = SimpleNamespace(encode_with_masks=lambda text: [text])
    found = encode_lines(tokenizer, "int f(int a,\r\n      int  b) {\n\n\treturn")
    assert found == ["int f(int a,", "int b) {", "return"]


@pytest.mark.parametrize(
    ("start", "prompt", "message"),
    [
        (None, 7, "'.*' has 7 tokens, and with new ones 11, .* 10; give .*=3$"),
        ((0,), 7, None),
        ((0, 5, 6, 7, 8, 9, 10), 7, "written has 11 tokens .* 10; give .*=3$"),
        ((0,), 11, "^'.*' has 11 tokens, more than the model's 10$"),
    ],
)
def test_what_is_too_long_is_said_of_the_side_that_it_is_on(start, prompt, message):
    """Formerly, with an encoder-decoder, the message mixed the tokens of both sides and
    advised fewer new tokens for a prompt that was itself too long."""
    model = SimpleNamespace(most=10, start=start, begin=(), arrange=None)
    model.lay_out = lambda prompts: [[4] * prompt for _ in prompts]
    rows = make_rows(model, ["a b"], Options(max_new_tokens=4))
    if message is None:
        assert len([*rows]) == 1
    else:
        with pytest.raises(UserError, match=message):
            next(rows)
