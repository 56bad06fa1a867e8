# SPDX-License-Identifier: Apache-2.0
import dataclasses
import importlib.util
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from host_half import make_half
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import fake_store, fake_tokenizer

from bertjax import UserError
from bertjax.data import loader as engines
from bertjax.data.batches import Batches, batch_sha256
from bertjax.data.features.make_features import split_needs
from bertjax.data.loader import stream
from bertjax.data.masking.vocab_tables import make_tables
from bertjax.data.mixture import make_mixture
from bertjax.data.sequences.make_plan import make_plan

V = 300
TOKENIZER = fake_tokenizer(V, word_starts=np.arange(V) % 3 > 0)
TABLES = make_tables(TOKENIZER)
needs_tf = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="tensorflow is not installed"
)


def batches(kind="pairs", preset="bert", B=8, seed=11, store=None, length=32, **how):
    rule = "nsp" if kind == "pairs" else None
    store = store or fake_store(400, 23, size=V)
    plan = make_plan(store, kind, length, 5, pair_rule=rule)
    needs = frozenset({"mlm", rule} - {None})
    features = make_half(needs, TOKENIZER, length, masking=preset, **how)
    mixture = make_mixture({"train": plan.n})
    return Batches((plan,), mixture, features, TOKENIZER, B, seed)


def join(parts):
    return {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}


def same(a, b):
    return batch_sha256(a) == batch_sha256(b)


def test_golden_hashes():
    """A run must stay the same after an upgrade: change these only for a reason."""
    hashes = {
        "pairs": batches().batch(1000),
        "full": batches("full_sentences", "roberta").batch(1000),
        "doc": batches("doc_sentences", mask_unit="word").batch(1000),
        "eval": next(batches().eval_batches(8)),
    }
    assert {k: batch_sha256(b)[:16] for k, b in hashes.items()} == {
        "pairs": "1b8eda0d16c6a1b7",
        "full": "4c3c15434aa09a4f",
        "doc": "76853e30788ab381",
        "eval": "bd3b28a52fc162b7",
    }


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([1, 2, 4, 8]))
def test_rows_of_all_hosts_make_the_global_batch(step, hosts):
    b = batches()
    size = 8 // hosts
    parts = [b.batch(step, slice(h * size, (h + 1) * size)) for h in range(hosts)]
    assert same(join(parts), b.batch(step))
    evals = [next(b.eval_batches(8, rows=slice(h, None, hosts))) for h in range(hosts)]
    whole = next(b.eval_batches(8))
    for h, part in enumerate(evals):
        assert all((part[k] == whole[k][h::hosts]).all() for k in whole)


def test_names_shapes_and_types():
    batch = batches().batch(0)
    shapes = {k: (v.shape, v.dtype.str[1:]) for k, v in batch.items()}
    assert shapes == {
        **dict.fromkeys(
            ("input_ids", "token_type_ids", "attention_mask"), ((8, 32), "i4")
        ),
        **dict.fromkeys(("mlm_positions", "mlm_ids"), ((8, 5), "i4")),
        "mlm_weights": ((8, 5), "f4"),
        "nsp_labels": ((8,), "i4"),
    }


@pytest.mark.parametrize("B", [8, 1000])
def test_an_epoch_shows_each_example_once_in_an_order_of_its_own(B):
    b = batches("doc_sentences", B=B)
    needed = -(-2 * b.n // B)
    plain = dataclasses.replace(b, features=make_half("", TOKENIZER, 32))
    rows = join([plain.batch(s) for s in range(needed)])["input_ids"]
    first, second = rows[: b.n].tolist(), rows[b.n : 2 * b.n].tolist()
    everything = join(list(plain.eval_batches(B)))["input_ids"][: b.n].tolist()
    assert sorted(first) == sorted(second) == sorted(everything)
    assert first != second and first != everything


def test_draws_change_with_the_epoch_and_the_seed():
    b = batches(store=fake_store(3, 1, size=V), B=1)
    hashes = {batch_sha256(b.batch(s)) for s in range(40 * b.n)}
    assert len(hashes) > 30
    assert not same(b.batch(0), batches(B=1, seed=12).batch(0))


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (5, 5)])
@pytest.mark.parametrize("kind", ["pairs", "full_sentences", "doc_sentences"])
def test_fewer_sequences_than_a_batch_work(kind, sizes):
    b = batches(kind, store=fake_store(*sizes, size=V), B=64)
    assert b.n < 64
    batch = b.batch(3)
    assert batch["mlm_weights"].any(axis=1).all()
    [only] = b.eval_batches(64)
    assert only["example_weights"].sum() == b.n


def test_eval_covers_every_example_with_draws_that_ignore_the_batch_size():
    b = batches()
    assert b.n % 9
    whole = join(list(b.eval_batches(b.n)))
    assert whole["example_weights"].all()
    for size in (1, 9, b.n + 5):
        seen = join(list(batches(seed=99).eval_batches(size)))
        real = seen["example_weights"] == 1
        assert len(real) % size == 0 and real.sum() == b.n
        assert not seen["mlm_weights"][~real].any()
        assert (seen["attention_mask"][~real].sum(1) > 2).all()
        for name in whole:
            assert (seen[name][real] == whole[name]).all()


def test_eval_takes_a_fixed_subset_in_natural_order():
    b = batches("doc_sentences")
    whole = join(list(b.eval_batches(b.n)))["input_ids"].tolist()
    few = join(list(b.eval_batches(4, examples=10)))
    rows = few["input_ids"][few["example_weights"] == 1].tolist()
    where = [whole.index(r) for r in rows]
    assert len(where) == 10 and where == sorted(where) and where != list(range(10))
    assert len(list(b.eval_batches(4, examples=10**9))) == -(-b.n // 4)


def test_a_ramp_of_mask_rates_may_have_begun_before_the_rows():
    """This happens after a rewind, which moves the rows but not the ramp."""
    whole = dataclasses.replace(batches(), start=10, end=20)
    rest = dataclasses.replace(whole, start=12, ramp_start=10)
    for step in (12, 15, 19):
        assert rest.gathered(step).progress == whole.gathered(step).progress
    assert dataclasses.replace(rest, ramp_start=None).gathered(12).progress == 0


def test_one_pair_objective_at_a_time():
    assert split_needs(frozenset({"mlm"})) == ("mlm", None, False)
    assert split_needs(frozenset({"mlm", "sop"})) == ("mlm", "sop", False)
    with pytest.raises(UserError, match="not nsp and sop"):
        split_needs(frozenset({"nsp", "sop"}))
    with pytest.raises(UserError, match=r"objective=clm\*1\+mlm\*1"):
        split_needs(frozenset({"clm", "mlm"}))


def test_max_predictions_sets_the_slots():
    b = batches(max_predictions=2)
    assert b.batch(0)["mlm_ids"].shape == (8, 2)
    assert b.specs["mlm_ids"].shape == (2,)


@pytest.mark.parametrize("kind", ["pairs", "full_sentences"])
def test_slots_are_those_of_the_arrays(kind):
    made = batches(kind)
    assert made.slots == made.batch(0)["input_ids"].size


def test_ids_beyond_the_vocabulary_are_refused():
    store = fake_store(40, 2, size=V)
    counts = np.bincount(store.tokens, minlength=V + 9)
    counts[V + 3] = 1
    with pytest.raises(UserError, match="holds id 303"):
        batches(store=SimpleNamespace(**vars(store), counts=counts))
    store.tokens[-1] = V
    with pytest.raises(UserError, match="holds id 300"):
        batches(store=store)


def test_hash_depends_on_names_types_and_values():
    batch = batches().batch(0)
    swapped = dict(reversed(batch.items()))
    assert same(batch, swapped)
    assert not same(batch, batch | {"nsp_labels": batch["nsp_labels"].astype(np.int64)})
    assert not same(batch, batch | {"nsp_labels": 1 - batch["nsp_labels"]})


@pytest.mark.parametrize(
    ("prefetch", "workers"), [(0, 1), (2, 2), (9, 4)], ids=["none", "usual", "many"]
)
def test_python_engine_keeps_order_and_ends_its_threads(prefetch, workers, monkeypatch):
    monkeypatch.setattr(engines, "PREFETCH", prefetch)
    monkeypatch.setattr(engines, "WORKERS", workers)
    b, before = batches(), threading.active_count()
    got = list(stream(b.batch, 7, 20, "python"))
    assert len(got) == 13
    assert all(same(g, b.batch(7 + i)) for i, g in enumerate(got))
    early = stream(b.batch, 0, 10**12, "python")
    assert same(next(early), b.batch(0))
    early.close()
    assert threading.active_count() == before
    assert list(stream(b.batch, 5, 5)) == []


def broken(step):
    if step >= 70:
        raise KeyError(f"step {step}")
    return {"step": np.full(2, step)}


def test_python_engine_lets_errors_surface_at_their_step():
    got = []
    with pytest.raises(KeyError, match="step 70"):
        for batch in stream(broken, 66, 80):
            got.append(int(batch["step"][0]))
    assert got == [66, 67, 68, 69]


def test_unknown_engines_and_missing_tensorflow(monkeypatch):
    with pytest.raises(UserError, match=r"data.engine='pyhton' .* mean 'python'"):
        stream(broken, 0, 1, "pyhton")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs tensorflow"):
        stream(broken, 0, 1, "tf")


def test_short_streams_never_load_tensorflow(monkeypatch):
    monkeypatch.setattr(engines, "_import_tensorflow", None)
    assert len(list(stream(broken, 0, 60, "tf"))) == 60


def test_a_failing_import_of_tensorflow_surfaces(monkeypatch):
    def fail():
        raise ImportError("broken tensorflow")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(engines, "_import_tensorflow", fail)
    with pytest.raises(ImportError, match="broken tensorflow"):
        for _ in stream(lambda step: {}, 0, 10**6, "tf"):
            pass


@needs_tf
def test_tensorflow_writes_nothing_when_it_is_loaded():
    code = "from bertjax.data.loader import _import_tensorflow as load; load()"
    silent = {k: v for k, v in os.environ.items() if not k.startswith("TF_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=silent
    )
    assert done.returncode == 0 and done.stderr == ""


def test_tf_engine_yields_the_same_batches_after_an_exact_seek():
    engines._import_tensorflow()
    b = batches()
    wanted = [batch_sha256(b.batch(s)) for s in range(3, 90)]
    assert [batch_sha256(g) for g in stream(b.batch, 3, 90, "tf")] == wanted
    direct = engines._tf_data(b.batch, 30, 50)
    assert [batch_sha256(g) for g in direct] == wanted[27:47]


@needs_tf
def test_tf_engine_lets_errors_surface_as_they_are_and_closes_early():
    got = []
    with pytest.raises(KeyError, match="step 70"):
        for batch in engines._tf_data(broken, 60, 99):
            got.append(int(batch["step"][0]))
    assert got == list(range(60, 70))
    early = engines._tf_data(lambda step: {"a": np.ones(2)}, 0, 2**62)
    next(early)
    # The loop reads from a thread of ours, because tf.data's own threads wake up too
    # late.
    assert [t for t in threading.enumerate() if t.name.startswith("batches")]
    early.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("batches")]
