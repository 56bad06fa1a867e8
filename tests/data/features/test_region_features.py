# SPDX-License-Identifier: Apache-2.0
"""One side of a row is masked, never both, and a hidden region occurs nowhere."""

import numpy as np
import pytest
from region_data import TOKENIZER, make_batches, make_config, make_rows, read, write

from bertjax.assembly import resolve
from bertjax.data.batches import batch_sha256
from bertjax.data.masking.vocab_tables import make_tables


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write(tmp_path_factory.mktemp("regions") / "rows.jsonl", make_rows(400))


@pytest.fixture(scope="module")
def made(table):
    """Return batches, and one batch of 400 rows with its gathered arrays."""
    batches = make_batches(*read(table, max_regions=8), batch_size=400)
    return batches, batches.gathered(0).arrays, batches.batch(0)


def test_one_side_is_masked_and_one_of_it_at_least(made):
    _, before, batch = made
    words = batch["mlm_weights"].sum(axis=1)
    regions = batch["region_weights"].sum(axis=1)
    kind = before["region_task"]
    assert min(np.bincount(kind)) > 90
    assert ((words >= 1) == (kind == 0)).all() and ((regions >= 1) == (kind == 1)).all()
    assert not ((words > 0) & (regions > 0)).any()
    assert (batch["alignment_weights"] == (kind == 2)).all()
    changed = (batch["input_ids"] != before["input_ids"]).any(axis=1)
    assert not changed[kind != 0].any() and changed[kind == 0].mean() > 0.8
    changed = (batch["region_features"] != before["region_features"]).any(axis=(1, 2))
    assert (changed == (kind == 1)).all()
    assert (batch["region_boxes"] == before["region_boxes"]).all()


@pytest.mark.parametrize(
    "keys, said",
    [
        ({}, "15% predicted, or 15% of the regions"),
        ({"region_mixture": "pairs=1"}, "nothing masked"),
        ({"region_mixture": "regions=1,pairs=1"}, "15% of the regions"),
        ({"hide_regions": True}, "15% predicted"),
    ],
)
def test_what_is_masked_is_said(keys, said):
    config, needs = make_config(**keys), frozenset({"regions", "labels"})
    how = TOKENIZER, make_tables(TOKENIZER), 12, config.data.mask_rate
    assert resolve.make_features(config, needs, *how).describe() == said


def test_what_is_masked_is_there_and_is_the_target(table):
    config, rows = read(table, max_regions=8, region_mask_rate=0.5)
    batches = make_batches(config, rows, batch_size=400)
    before, batch = batches.gathered(0).arrays, batches.batch(0)
    for i in range(400):
        at = batch["region_positions"][i][batch["region_weights"][i] > 0]
        real = before["region_mask"][i].sum()
        if before["region_task"][i] == 1:
            assert len(at) == max(1, round(0.5 * real)) and len({*at}) == len(at)
            assert (np.diff(at) > 0).all() and at.max() < real
        hidden = np.zeros(8, bool)
        hidden[at] = True
        own = before["region_features"][i]
        assert (batch["region_features"][i] == np.where(hidden[:, None], 0, own)).all()
        assert (batch["region_targets"][i, : len(at)] == own[at]).all()
        assert not batch["region_targets"][i, len(at) :].any()
        truth = before["region_classes"][i][at]
        assert (batch["region_classes"][i, : len(at)] == truth).all()
    # Every region gets hidden in some row.
    chosen = batch["region_positions"][batch["region_weights"] > 0]
    assert {*chosen.tolist()} == {*range(6)}


def test_specs_are_what_is_made(made):
    batches, _, batch = made
    assert {k: (v.shape[1:], v.dtype.name) for k, v in batch.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in batches.specs.items()
    }
    counts = batches.inspect(0).counts
    rows = [counts[f"rows_about_{kind}"] for kind in ("words", "regions", "pairs")]
    assert (
        sum(rows) == 400 and counts["masked_regions"] == batch["region_weights"].sum()
    )


def test_a_batch_is_a_function_of_config_seed_and_step(table):
    first, again = (make_batches(*read(table, max_regions=8)) for _ in range(2))
    hashes = [batch_sha256(first.batch(step)) for step in (0, 1, 40)]
    assert hashes == [batch_sha256(again.batch(step)) for step in (0, 1, 40)]
    assert len({*hashes}) == 3
    halves = [first.batch(40, slice(k, k + 8)) for k in (0, 8)]
    whole = {k: np.concatenate([half[k] for half in halves]) for k in halves[0]}
    assert batch_sha256(whole) == hashes[2]
    other = make_batches(*read(table, max_regions=8), seed=4)
    assert batch_sha256(other.batch(0)) != hashes[0]


def test_rows_of_evaluations_do_not_depend_on_their_batch(table):
    batches = make_batches(*read(table, max_regions=8), scored=True)
    small = [*batches.eval_batches(7, 21)]
    (large,) = batches.eval_batches(24, 21)
    for name, values in large.items():
        joined = np.concatenate([batch[name] for batch in small])
        assert (joined == values[:21]).all(), name
    for name in ("mlm_weights", "region_weights", "alignment_weights"):
        assert not large[name][21:].any()


def test_hidden_regions_leave_the_masked_words_as_they_are(table):
    shown, hidden = (
        make_batches(*read(table, max_regions=8, hide_regions=hide)).batch(2)
        for hide in (False, True)
    )
    for name in ("input_ids", "mlm_positions", "mlm_ids", "mlm_weights"):
        assert (shown[name] == hidden[name]).all()
    for name in ("region_mask", "region_weights", "alignment_weights"):
        assert shown[name].any() and not hidden[name].any()
