# SPDX-License-Identifier: Apache-2.0
import pytest

from bertjax import speedrun
from bertjax.assembly import command_line, validate
from bertjax.speedruns.tracks import PASSES, TRACKS, check_recipe

TOKENS = 15_036_990  # of the text, with the track's tokenizer


@pytest.mark.parametrize("name", TRACKS)
def test_the_own_recipe_of_a_track_keeps_its_rules(name):
    config = command_line.parse(speedrun.with_recipe(TRACKS[name], [])).config
    validate.check(config)
    check_recipe(name, config)
    speedrun.check_scored(config, None)
    slots = config.total.steps * config.batch_size * config.data.length
    # Rows with padding have fewer tokens than slots, and so make fewer passes.
    assert slots <= PASSES * TOKENS
