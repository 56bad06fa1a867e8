# SPDX-License-Identifier: Apache-2.0
"""Estimates of the remaining time, by a clock that moves only when it is told to."""

import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from bertjax.data import progress
from bertjax.inference import embed_texts, forward
from bertjax.scoring import pseudo_likelihoods as pll


def test_a_plain_line_says_units_and_the_time_that_their_work_leaves():
    plain = progress.Progress("prepare", total=100, unit="MB")
    plain.done = 25
    assert plain.line(10.0) == "prepare: 25.0 of 100.0 MB, 2.5 MB/s, 30 s left"
    plain.begin()  # earlier time does not count
    plain.done = 50
    assert plain.line(10.0) == "prepare: 50.0 of 100.0 MB, 2.5 MB/s, 20 s left"
    endless = progress.Progress("prepare", unit="MB")
    endless.add(25)
    assert endless.line(10.0) == "prepare: 25.0 MB, 2.5 MB/s"
    counts = progress.Progress("score", total=12345.0, unit="tokens")
    counts.add(1235.0)
    told = "score: 1,235 of 12,345 tokens, 123.5 tokens/s, 90 s left"
    assert counts.line(10.0) == told
    weighed = progress.Progress("embed", total=100, unit="lines", work=4000)
    weighed.add(10, work=1000)  # the longest tenth is a quarter of the work
    assert weighed.line(10.0) == "embed: 10 of 100 lines, 1.0 lines/s, 30 s left"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_goes_by_work_and_says_units(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.Progress("embed", total=100, unit="lines", work=4000) as shown:
        shown.add(10, work=1000)
        assert shown.bar.n == 1000 and shown.bar.total == 4000
        assert "25%" in str(shown.bar) and "10/100 lines" in str(shown.bar)


class Clock:
    """The clock moves with the computation: one second per thousand padded tokens."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.left = []  # the reported seconds after each batch
        own = progress.Progress.add

        def add(shown, *told, **work):
            own(shown, *told, **work)
            said = shown.line(self.now - shown.started)
            self.left.append((self.now, float(said.split()[-3].replace(",", ""))))

        fake = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(progress, "time", fake)
        monkeypatch.setattr(progress.Progress, "add", add)

    def compute(self, slots):
        self.now += slots / 1000

    def check(self):
        assert len(self.left) > 3
        for now, left in self.left:
            assert left == pytest.approx(self.now - now, rel=0.1, abs=5)


def test_embed_estimates_by_padded_tokens(monkeypatch):
    """Long rows come first: counting rows made the first estimate far too high."""
    clock = Clock(monkeypatch)
    sizes = [500] * 32 + [40] * 800 + [10] * 800
    rows = [np.ones(size, np.int32) for size in sizes]

    class Vectors:
        """An array that is computed when it is read, as on an accelerator."""

        def __init__(self, ids):
            self.shape = ids.shape

        def __array__(self, *told, **more):
            clock.compute(np.prod(self.shape))
            return np.zeros((self.shape[0], 4), np.float32)

    monkeypatch.setattr(embed_texts, "tokenize", lambda *told: (rows, 0))
    model = embed_texts.Embedder(
        lambda batch: Vectors(batch["input_ids"]),
        SimpleNamespace(pad_id=0),
        SimpleNamespace(longest=512, prompt="", kind="dense"),
        None,
        {},
    )
    assert model.embed([""] * len(rows), 8)[0].shape == (len(rows), 4)
    clock.check()


def test_pll_estimates_by_padded_tokens(monkeypatch):
    """Short texts come first, with one row per token."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(pll, "Progress", progress.Progress)
    sizes = np.array([4] * 500 + [20] * 100 + [120] * 40)
    texts = [[7] * size for size in sizes]
    pieces = SimpleNamespace(pad_id=0, cls_id=1, sep_id=2, mask_id=3)
    work = pll.count_work(sizes + 2)
    with progress.Progress("score", int(sizes.sum()), "tokens", work) as shown:
        for which, batch in pll.batches(texts, pieces, "original"):
            ids = batch["input_ids"]
            clock.compute(ids.size)
            shown.add(len(which), work=len(which) * ids.shape[1])
    clock.check()


def test_batches_by_falling_length():
    sizes = np.array([3, 40, 100, 33, 5])
    at_once, plan = forward.plan_batches(sizes, batch_size=2, longest=128)
    assert at_once == 2 and [which.tolist() for which, _ in plan] == [
        [2, 1],
        [3, 4],
        [0],
    ]
    assert [length for _, length in plan] == [112, 56, 7]
    assert forward.count_work(plan) == 2 * 112 + 2 * 56 + 7
