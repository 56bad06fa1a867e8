# SPDX-License-Identifier: Apache-2.0
"""Phases: where they begin, and how the cursor moves at their edges."""

import itertools
import math
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax import UserError
from bertjax.data.mixture import make_mixture
from bertjax.data.phases import (
    Wanted,
    change_phases,
    count_steps,
    find_repeats,
    from_plain,
    measure,
    move_cursor,
    parse_phases,
    place_phases,
    skip_batches,
    steps_within,
    to_plain,
)
from bertjax.data.sequences.make_plan import make_plan

SIZES = {64: 900, 128: 1000, 512: 240}


def rows_of(sizes):
    """Return a function from a phase to its rows per epoch, which depend on length."""
    return lambda phase: sizes[phase.length]


def wanted(text, **defaults):
    return parse_phases(text, **{"batch_size": 8, "length": 128, "mask_rate": None} | defaults)  # fmt: skip # noqa: E501


def test_no_phases_are_one():
    assert wanted("") == [Wanted("", math.inf, 8, 128, None)]


def test_settings_not_named_are_the_configs():
    first, second = wanted("percent=90 mask_rate=0.3; length=512, batch_size=4")
    assert first == Wanted("percent", 90, 8, 128, 0.3)
    assert second == Wanted("", math.inf, 4, 512, None)


@pytest.mark.parametrize(
    "text, word",
    [
        ("length=512; length=128", "phase 1 needs one of"),
        ("steps=5 percent=3; length=128", "phase 1 needs one of"),
        ("steps=5; steps=6", "phase 2 needs none"),
        ("percent=150; length=9", "150% leave nothing"),
        ("steps=5; lenght=512", "did you mean 'length'"),
        ("steps=x; length=512", "steps=x"),
        ("steps=5; length=51.5", "length=51.5"),
        ("steps=5; length=-1", "length=-1"),
        ("steps=5; length", "'length'"),
        ("steps=5 steps=6; length=9", "given twice"),
        ("steps=5;;length=9", "phase 2 needs one of"),
    ],
)
def test_bad_phases(text, word):
    with pytest.raises(UserError, match=word):
        wanted(text)


@pytest.mark.parametrize(
    "extent, start",
    [
        ("steps=15", 15),
        ("percent=15", 15),
        ("percent=14.1", 15),
        ("examples=120", 15),
        ("examples=121", 16),
        ("tokens=15360", 15),
        ("epochs=0.12", 15),
    ],
)
def test_where_a_phase_begins(extent, start):
    placed = place_phases(wanted(f"{extent}; length=512"), 100, rows_of(SIZES))
    assert [p.start for p in placed] == [0, start]


def test_phases_beyond_the_end_are_left_out():
    three = wanted("steps=10; steps=10 length=512; length=64")
    assert len(place_phases(three, 10, rows_of(SIZES))) == 1
    assert len(place_phases(three, 11, rows_of(SIZES))) == 2
    assert len(place_phases(three, 21, rows_of(SIZES))) == 3


def test_the_cursor_counts_examples():
    """The same length continues with the next example, another at the same share."""
    a, b, c = place_phases(
        wanted("steps=15 batch_size=100; steps=5 batch_size=50; length=512"),
        99,
        rows_of(SIZES),
    )
    assert (b.start, b.first) == (15, 1500)
    assert (c.start, c.first) == (20, 240 + 180)  # 1,750 rows: 3/4 of epoch 1
    assert a.example(15) == b.example(15) and b.example(20) == 1750


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(1, 10**6))
def test_moving_the_cursor(example, n, other):
    moved = move_cursor(example, n, other)
    assert move_cursor(example, n, n) == example
    epoch = moved // other
    # The cursor never moves back, and less than a row too far.
    assert moved * n >= example * other
    assert (moved - 1) * n < example * other
    assert epoch in (example // n, example // n + 1)


@given(st.integers(1, 400), st.sampled_from(["examples", "tokens", "epochs"]))
def test_total_in_any_unit(total, unit):
    """Covering what `total` steps cover takes `total` steps."""
    parts = wanted("percent=30; percent=30 batch_size=16; length=512 batch_size=2")

    def place(steps):
        return place_phases(parts, steps, rows_of(SIZES))

    number = measure(unit, place(total), total)
    found = count_steps(unit, number, place)
    assert measure(unit, place(found), found) >= number * (1 - 1e-9)
    assert found <= total
    if found > 1:
        assert measure(unit, place(found - 1), found - 1) < number


def test_total_without_phases_is_a_quotient():
    def place(steps):
        return place_phases(wanted(""), steps, rows_of(SIZES))

    assert count_steps("steps", 7, place) == 7
    assert count_steps("examples", 81, place) == 11
    assert count_steps("tokens", 8 * 128 * 5, place) == 5
    assert count_steps("epochs", 0.1, place) == 13  # 100 rows in batches of 8
    assert count_steps("epochs", 0, place) == 0
    assert count_steps("examples", 8 * 10**7, place) == 10**7


def planned_at(*lengths):
    """Return plans of one text by length, and their rows per epoch."""
    rng = np.random.default_rng(0)
    corpus = [rng.geometric(1 / 20, n) for n in rng.geometric(1 / 30, 400)]
    sentences = np.cumsum([0, *np.concatenate(corpus)])
    store = SimpleNamespace(
        tokens=np.zeros(sentences[-1], np.uint16),
        sentences=sentences,
        documents=np.cumsum([0] + [len(d) for d in corpus]),
    )
    plans = {n: make_plan(store, "full_sentences", n, 0) for n in lengths}
    return plans, {n: plan.n for n, plan in plans.items()}


def seen_of(plan, positions):
    """Return how often each token occurs in the rows at these positions of a run."""
    example = make_mixture({"train": plan.n}).locate(1, positions).example
    times = np.zeros(len(plan.tokens) + 1, int)
    np.add.at(times, plan.starts[example], 1)
    np.add.at(times, plan.stops[example], -1)
    return np.cumsum(times)[:-1]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("epochs=0.5 length=64; length=256", [(0.5, 0.25)]),
        ("epochs=0.2 length=64; length=256", [(0.2, 0.16)]),
        ("epochs=1.7 length=256; length=64", [(0.7, 0.21)]),
        (
            "epochs=0.3 length=64; epochs=0.3 length=256; length=128",
            [(0.3, 0.21), (0.51, 0.294)],
        ),
        # Back at the first length, the rows that were seen with it do not repeat.
        (
            "epochs=0.3 length=64; epochs=0.3 length=256; length=64",
            [(0.3, 0.21), (0.3, 0.21)],
        ),
    ],
)
def test_what_a_change_of_length_repeats(text, expected):
    """The reported shares are those of the tokens of a real plan."""
    plans, sizes = planned_at(64, 128, 256)
    phases = place_phases(wanted(text, batch_size=1), 10**9, rows_of(sizes))
    repeats = find_repeats(phases)
    said = np.array([(r.again, r.missed) for r in repeats])
    assert said == pytest.approx(np.array(expected), abs=0.01)
    last = repeats[-1]
    before = np.zeros(len(plans[64].tokens), int)
    for phase, following in itertools.pairwise(phases):
        ends = phase.first, phase.example(following.start)
        begin = max(ends[0], last.epoch * phase.n)
        before += seen_of(plans[phase.length], np.arange(begin, ends[1]))
    now = phases[-1]
    rest = seen_of(plans[now.length], np.arange(now.first, (last.epoch + 1) * now.n))
    again = (rest * (before > 0)).sum() / rest.sum()
    missed = ((rest == 0) & (before == 0)).mean()
    assert (again, missed) == pytest.approx(expected[-1], abs=0.02)


def test_the_line_of_a_repeat():
    [repeat] = find_repeats(
        place_phases(wanted("steps=350; length=512", batch_size=5), 999, rows_of(SIZES))
    )
    assert str(repeat).startswith(
        "phases: rows change from 128 to 512 tokens at step 350, after 1.75 epochs: "
        "about 75% of the text in the rest of that epoch was seen in it before, and "
        "about 19% of its text is not seen in it;"
    )


@pytest.mark.parametrize(
    "text",
    [
        "epochs=1; length=512",
        "epochs=3; length=512",
        "steps=124; length=512",  # a batch before the end of the epoch
        "steps=126; length=512",
        "steps=30; batch_size=16",
        "steps=30; mask_rate=0.3",
        "",
    ],
)
def test_nothing_is_repeated(text):
    assert not find_repeats(place_phases(wanted(text), 999, rows_of(SIZES)))


def test_going_on_with_nothing_new_changes_nothing():
    parts = wanted("steps=15 batch_size=100; steps=5 batch_size=50; length=512")
    placed = place_phases(parts, 99, rows_of(SIZES))
    for step in (0, 1, 14, 15, 16, 20, 50):
        assert change_phases(placed, placed, step) == placed
    assert from_plain([asdict(p) for p in placed]) == placed


def test_going_on_with_another_batch_size():
    """The cursor continues in examples; past phases stay as they were."""
    old = place_phases(wanted("steps=15; length=512"), 99, rows_of(SIZES))
    new = place_phases(
        wanted("steps=15; length=512", batch_size=16), 99, rows_of(SIZES)
    )
    first, second, third = change_phases(new, old, 10)
    assert first == old[0]
    assert (second.start, second.first, second.batch_size) == (10, 80, 16)
    assert (third.start, third.length, third.batch_size) == (15, 512, 16)
    assert third.first == move_cursor(80 + 5 * 16, 1000, 240)
    # The next checkpoint of this run gives the same phases.
    assert change_phases(new, (first, second, third), 12) == (first, second, third)
    # So does the old checkpoint, if the run was killed before the next one.
    assert change_phases(new, old, 10) == (first, second, third)


def test_going_on_with_another_length():
    old = place_phases(wanted(""), 99, rows_of(SIZES))
    new = place_phases(wanted("", length=512), 99, rows_of(SIZES))
    _, now = change_phases(new, old, 25)  # 200 of 1,000 rows were seen
    assert (now.start, now.first, now.n) == (25, 48, 240)


def test_going_on_where_another_phase_would_have_begun():
    """It has seen no row: 504 were, not the 505 to which 121 of 240 are rounded up."""
    old = place_phases(wanted("steps=63; length=512"), 99, rows_of(SIZES))
    assert old[1].first == 121
    for text in ("", "steps=80; length=512", "steps=63; batch_size=4"):
        new = place_phases(wanted(text), 99, rows_of(SIZES))
        found = change_phases(new, old, 63)
        assert found == new and found[-1].n in (1000, 240)
    # Rows that were skipped there stay skipped.
    back = skip_batches(old, 63, 70)
    _, now = change_phases(place_phases(wanted(""), 99, rows_of(SIZES)), back, 63)
    assert now.first == move_cursor(old[1].example(70), 240, 1000)


@pytest.mark.parametrize(
    "unit, number, begin, end",
    [
        ("steps", 7, 7, 7),
        ("percent", 12.5, 3, 3),
        ("examples", 96, 11, 3),
        ("examples", 97, 11, 4),
        ("tokens", 96 * 128, 11, 3),
        ("epochs", 0.08, 10, 3),  # 80 rows
        ("examples", 401, 21, 21),  # more than the whole run
    ],
)
def test_durations_at_both_ends(unit, number, begin, end):
    """The run has 10 steps of 8 rows, then 10 of 32: 400 rows."""
    placed = place_phases(wanted("steps=10; batch_size=32"), 20, rows_of(SIZES))
    assert steps_within(unit, number, placed, 20) == begin
    assert steps_within(unit, number, placed, 20, end=True) == end


def test_a_batch_that_grows_with_the_tokens():
    """Rows have 128 tokens: 4 per step to 10,240 tokens, 8 to 30,720, then 16."""
    parts = wanted(
        "tokens=10_240 batch_size=4; tokens=20480 batch_size=8; batch_size=16"
    )
    placed = place_phases(parts, 100, rows_of(SIZES))
    assert [(p.start, p.batch_size) for p in placed] == [(0, 4), (20, 8), (40, 16)]
    assert measure("tokens", placed, 40) == 30_720
    assert [p.first for p in placed] == [0, 80, 240]


def test_batches_are_skipped():
    """After a rewind from step 25 to 12, the rows up to 25 are skipped."""
    parts = wanted("steps=10; steps=30 batch_size=32; length=512 batch_size=4")
    planned = place_phases(parts, 100, rows_of(SIZES))
    again = skip_batches(planned, 12, 25)
    assert [p.start for p in again] == [0, 10, 12]
    assert again[-1].example(12) == planned[1].example(25)
    made = change_phases(planned, again, 12)
    assert made[:3] == again and [p.start for p in made] == [0, 10, 12, 40]
    # The next phase begins where the rows are, 13 updates of 32 later than planned.
    assert made[3].first == move_cursor(made[2].example(40), 1000, 240)
    assert change_phases(planned, made, 12) == change_phases(planned, made, 30) == made
    # Skip again from the same place, and across a change of length.
    twice = change_phases(planned, skip_batches(made, 12, 20), 12)
    assert [p.start for p in twice] == [0, 10, 12, 40]
    assert twice[2].first == made[2].example(20)
    # A ramp of mask rates continues from its beginning, also in a resumed run.
    assert [p.ramp_start for p in made] == [p.ramp_start for p in twice]
    assert [p.ramp_start for p in twice] == [None, None, 10, None]
    assert from_plain(to_plain(twice)) == twice
    assert "ramp_start" not in to_plain(planned)[0]  # as in files of earlier versions
    across = skip_batches(planned, 38, 44)
    first = move_cursor(planned[2].example(44), 240, 1000)
    assert (across[-1].start, across[-1].first) == (38, first)


def test_a_ramp_goes_on_with_another_batch_size():
    """A ramp also continues after a rewind; a different ramp begins anew."""
    parts = "steps=10; mask_rate=0.3:0.15"
    planned = place_phases(wanted(parts), 100, rows_of(SIZES))
    larger = place_phases(wanted(parts, batch_size=16), 100, rows_of(SIZES))
    now = change_phases(larger, planned, 40)[-1]
    assert (now.start, now.ramp_start, now.batch_size) == (40, 10, 16)
    back = change_phases(planned, skip_batches(planned, 40, 50), 40)
    assert change_phases(larger, back, 60)[-1].ramp_start == 10
    other = place_phases(wanted("mask_rate=0.4:0.2"), 100, rows_of(SIZES))
    assert change_phases(other, planned, 40)[-1].ramp_start is None


def test_a_ramp_of_a_phase_that_is_added_is_its_own():
    """It begins with its phase, also in a run that resumes at that very step."""
    ramp = dict(mask_rate="0.3:0.15")
    whole = place_phases(wanted("", **ramp), 100, rows_of(SIZES))
    added = place_phases(wanted("steps=80; length=512", **ramp), 100, rows_of(SIZES))
    for step in (79, 80, 81):
        last = change_phases(added, whole, step)[-1]
        assert (last.start, last.ramp_start) == (max(step, 80), None)
    # A longer row length for the rest of the run does not make it another phase.
    longer = place_phases(wanted("", length=512, **ramp), 100, rows_of(SIZES))
    assert change_phases(longer, whole, 40)[-1].ramp_start == 0


def test_commas_part_settings_but_not_the_options_of_an_objective():
    text = "percent=50,length=64, objective=cuglm:stages=1,types=0; batch_size=4,"
    first, second = wanted(text)
    assert (first.extent, first.length) == (50, 64)
    assert first.objective == "cuglm:stages=1,types=0" and second.batch_size == 4
