# SPDX-License-Identifier: Apache-2.0
"""Which models write, and which are refused in a line."""

import dataclasses
from types import SimpleNamespace

import pytest

from bertjax import UserError
from bertjax.generation.open_writer import open_dialogue
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
    """They ended in a ValueError when the first answer was written."""
    opened = SimpleNamespace(checkpoint="runs/chat")
    with pytest.raises(UserError, match="runs/chat writes no answers"):
        open_dialogue(opened, ({}, dataclasses.replace(CFG, **other)))
