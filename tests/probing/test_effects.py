# SPDX-License-Identifier: Apache-2.0
"""Effects of a concept, on causal models with known effects."""

import numpy as np
import pytest

from bertjax import UserError, probe
from bertjax.probing import effects, run_effects
from bertjax.probing.effects import Outputs
from bertjax.tasks.tables import Row

EFFECT = 0.3


def draw(n, concept_given_rest=(0.2, 0.8), seed=0):
    """Draw texts of a causal model, and the outputs of ideal classifiers on them.

    The rest z is 0 or 1 with probability 1/2, the concept c depends on z, and
    P(y | c, z) = 0.15 + 0.3 c + 0.4 z.
    """
    rng = np.random.default_rng(seed)
    z = rng.integers(0, 2, n)
    q = np.array(concept_given_rest)[z]
    c = rng.random(n) < q
    both = 0.15 + EFFECT * c + 0.4 * z
    rest = 0.15 + EFFECT * q + 0.4 * z
    classes = [np.stack([1 - p, p], axis=1) for p in (both, rest)]
    return Outputs(*classes, q, c)


def test_known_effects_are_found_and_the_conditional_expectation_is_another():
    outputs = draw(20_000)
    # E |c - q| = 2 q (1 - q)
    known = EFFECT * 2 * 0.2 * 0.8
    found = effects.treate(outputs)
    assert abs(found["value"] - known) < found["ci95"] < 0.1 * known
    first, second = effects.effect(outputs)
    assert second["value"] == pytest.approx(EFFECT) and second["ci95"] < 1e-6
    assert first["value"] == pytest.approx(-EFFECT)
    conexp = effects.conditional_expectation(outputs)[1]
    assert abs(conexp["value"] - (EFFECT + 0.4 * 0.6)) < 2 * conexp["ci95"] < 0.03
    assert abs(conexp["value"] - EFFECT) > 0.5 * EFFECT


def test_without_confounding_all_agree():
    outputs = draw(20_000, (0.5, 0.5))
    conexp = effects.conditional_expectation(outputs)[1]
    assert abs(conexp["value"] - EFFECT) < 2 * conexp["ci95"]
    assert effects.treate(outputs)["value"] == pytest.approx(EFFECT / 2)
    assert effects.effect(outputs)[1]["value"] == pytest.approx(EFFECT)


def test_texts_that_all_have_the_concept_tell_no_difference():
    outputs = draw(50)._replace(concept=np.ones(50, bool))
    assert effects.conditional_expectation(outputs) is None
    classes = {
        "label": run_effects.Classes(("no", "yes"), None, np.zeros(50, np.int32)),
        "concept": run_effects.Classes(("f", "m"), None, np.ones(50, np.int32)),
    }
    named = {"label": outputs.factual, "concept": outputs.factual}
    found = run_effects.effects_of({"factual": named, "treated": named}, classes)
    assert found["conexp"] is None
    rest = {"rows": {"train": 50, "valid": 50}, "probes": {}}
    assert "CONEXP      not told" in run_effects.describe(rest | found)


def test_intervals_hold_what_they_say():
    """With noisy classifiers, 95% of 300 intervals contain the true effect."""
    held = 0
    for seed in range(300):
        outputs = draw(200, seed=seed)
        noise = np.random.default_rng(seed + 1000).normal(0, 0.1, 200)
        factual = outputs.factual + np.stack([-noise, noise], axis=1)
        found = effects.effect(outputs._replace(factual=factual))[1]
        held += abs(found["value"] - EFFECT) < found["ci95"]
    assert 275 <= held <= 295  # 285 expected, standard deviation 3.8


def test_a_concept_that_is_still_told_gives_no_effect():
    outputs = draw(100)
    told = outputs._replace(expected=outputs.concept * 1.0)
    assert effects.effect(told) is None


def test_what_another_label_tells():
    groups, labels = np.array([0, 0, 0, 1, 1]), np.array([1, 1, 0, 0, 0])
    assert effects.most_likely(groups, labels, np.array([0, 1, 2])).tolist() == [
        1,
        0,
        0,
    ]


def test_total_variation_is_that_of_one_class_where_there_are_two():
    a, b = np.array([[0.2, 0.8], [1.0, 0.0]]), np.array([[0.5, 0.5], [1.0, 0.0]])
    assert effects.total_variation(a, b) == pytest.approx([0.3, 0.0])


def test_gaps_are_of_texts_that_have_a_counterfactual():
    texts = ["He sings", "She sings", "It rains", "The man and the woman"]
    rows = [Row({"x": text, "n": 1}, f"t:{i}") for i, text in enumerate(texts)]
    pairs = {"he": "she", "she": "he"}
    other = run_effects.swapped_rows(rows, ["x"], pairs)
    assert [row.cells["x"] for row in other] == ["She sings", "He sings", *texts[2:]]
    p = np.array([0.7, 0.4, 0.5, 0.5, 0.4, 0.7, 0.9, 0.1])
    concept = run_effects.Classes(("f", "m"), np.zeros(1), np.array([1, 0, 1, 0]))
    label = run_effects.Classes(("no", "yes"), np.zeros(1), np.zeros(4))
    found = {"factual": {"label": np.stack([1 - p, p], axis=1)}}
    classes = {"label": label, "concept": concept}
    gaps = run_effects.gaps_of(found, [[], rows, other], ["x"], classes)
    assert gaps["texts"] == 2
    assert gaps["factual"]["value"] == pytest.approx(0.3)
    assert gaps["factual_effect"]["yes"]["value"] == pytest.approx(0.3)
    with pytest.raises(UserError, match="words of the pairs are in 0 texts"):
        run_effects.gaps_of(found, [[], rows, rows], ["x"], classes)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--treated=y"], "--treated needs --concept"),
        (["--swap=y", "--seeds=4"], "--seeds has no effect with --swap"),
        (["--swap=y", "--probes=linear,mlp"], "--swap takes one of them"),
        (["--concept=c"], "--concept needs --treated, or --swap"),
    ],
)
def test_flags_that_do_not_go_together(flags, message):
    given = ["--model=x", "--train=a", "--valid=b", "--text=t", "--label=l"]
    with pytest.raises(UserError, match=message):
        probe.main([*given, *flags])
