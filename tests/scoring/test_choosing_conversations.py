# SPDX-License-Identifier: Apache-2.0
"""Which conversations evaluate --what=answers uses."""

import pytest

from bertjax import UserError
from bertjax.scoring import answers


def test_where_none_of_the_chosen_fits_others_are_taken(monkeypatch):
    pairs = [({"turns": [n]}, str(n)) for n in range(10)]
    monkeypatch.setattr(answers.dialogues, "Conversations", lambda opened: None)
    monkeypatch.setattr(answers, "fits", lambda rows, prompt: prompt["turns"][0] % 2)
    assert answers.choose(None, pairs, 4, "x") == [pairs[i] for i in (5, 7)]
    assert answers.choose(None, pairs, 5, "x") == [pairs[i] for i in (1, 3, 5, 7, 9)]
    assert answers.choose(None, pairs, 1, "x") == [pairs[1]]
    monkeypatch.setattr(answers, "fits", lambda rows, prompt: False)
    with pytest.raises(UserError, match="x has no conversation of two turns or more"):
        answers.choose(None, pairs, 1, "x")
