# SPDX-License-Identifier: Apache-2.0
"""Texts generated for rows: their scores are those of the training objective."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from text_pairs import (
    PLACES,
    Specials,
    T,
    batch_of,
    model_of,
)

from bertjax.assembly import command_line
from bertjax.generation import answers
from bertjax.objectives.base import TokenIds

TOKENS = TokenIds(Specials.pad_id, 1, Specials.cls_id, Specials.sep_id, 4)


def written(place, batch, ends=False):
    """Generate after the rows of a batch; without `ends`, T + 1 tokens for each."""
    tokens = TOKENS if ends else dataclasses.replace(TOKENS, sep_id=-1)
    writing = answers.Writing(T + 1 + (place == "decoder"))
    return program(place, tokens, writing)(model_of(place).params, batch)


@functools.cache
def program(place, *how):
    cfg = model_of(place).cfg
    return jax.jit(lambda params, batch: answers.write(params, cfg, batch, *how))


@pytest.mark.parametrize("place", PLACES)
def test_scores_are_those_of_the_rows_that_are_learnt(place):
    """A generated text has the same ln p when it is the target of its row."""
    found = written(place, batch_of(place))
    ids = np.asarray(found.ids)
    assert found.lengths.tolist() == [ids.shape[1]] * 4
    shown = ids[:, 1:] if place == "decoder" else ids  # a decoder generates [CLS] too
    batch = batch_of(place, targets=[row[:T].tolist() for row in shown])
    if place == "decoder":  # the first generated token replaces [CLS]
        batch["lm_ids"][:, 0] = batch["decoder_input_ids"][:, 1] = ids[:, 0]
    model = model_of(place)
    own = model.log_p(model.params, batch)[:, : ids.shape[1] - 1]
    np.testing.assert_allclose(own, found.log_probs[:, :-1], atol=2e-5)


@pytest.mark.parametrize("place", ["prefix", "decoder"])
def test_targets_are_not_read(place):
    """With another target, and without one, the same text is generated."""
    first = written(place, batch_of(place))
    for targets in ([[6] * 5] * 4, None):
        other = written(place, batch_of(place, targets=targets))
        np.testing.assert_array_equal(first.ids, other.ids)
        np.testing.assert_allclose(first.log_probs, other.log_probs, atol=1e-5)


def test_outputs():
    model, batch = model_of("prefix"), batch_of()
    writing = answers.Writing(T + 1)
    whole = answers.with_texts(model.objective, model.cfg, TOKENS, writing)
    evaluate = jax.jit(whole.evaluate)
    sums, outputs = evaluate(model.params, batch)
    plain, own = model.evaluate(model.params, batch)
    assert sums["lm_loss"].value == plain["lm_loss"].value
    assert outputs.keys() - own.keys() == {
        "generated_ids",
        "generated_lengths",
        "generated_scores",
    }
    found = written("prefix", batch, ends=True)
    np.testing.assert_array_equal(outputs["generated_ids"], found.ids)
    np.testing.assert_allclose(outputs["generated_scores"], found.scores, atol=1e-5)
    # Rows without targets have no other outputs.
    sums, outputs = evaluate(model.params, batch_of(targets=None))
    assert not sums and len(outputs) == 3


def test_how_a_config_writes():
    flags = "task.num_beams=4", "task.length_penalty=2", "task.target_length=9"
    flags = ["--config=finetune/seq2seq.py", *(f"--config.{flag}" for flag in flags)]
    for family, width in ("bert", 10), ("bart", 11), ("t5", 10):
        given = [*flags, f"--config.model.family={family}"]
        config = command_line.parse(given).config
        assert answers.writing_of(config) == answers.Writing(width, 4, 2.0, 0.05)
