# SPDX-License-Identifier: Apache-2.0
"""The loop alone: what is due when, what is read, what is saved, without a run."""

from types import SimpleNamespace

import numpy as np
import pytest

from bertjax import RunError
from bertjax.checkpoints.best import BestTracker
from bertjax.training import loop as loops
from bertjax.training.loop import Loop, LoopState, TrainLoop, run_loop


class Recorder(Loop):
    """Writes down what the loop asks for; stop_at: the step after which a signal is."""

    def __init__(self, total=6, every=None, step=0, owes=False, stop_at=None, bad=()):
        self.state = LoopState(step=step, total=total)
        self.every = every or {"eval": 4, "checkpoint": 3}
        self.owes, self.stop_at, self.bad = owes, stop_at, [*bad]
        self.log, self.interrupted = [], False

    @property
    def must_rewind(self):
        return bool(self.bad) and self.state.step == self.bad[0]

    def owes_evaluation(self):
        return self.owes

    def update(self):
        self.state.step += 1
        self.log.append(self.state.step)
        self.state.stopping |= self.state.step == self.stop_at

    def drain(self, keep=0):
        assert keep == 0
        self.log.append("drain")

    def rewind(self):
        self.log.append("rewind")
        self.state.step = self.bad.pop(0) - 2

    def evaluate(self):
        self.log.append("evaluate")
        return not self.interrupted

    def must_save(self):
        return self.state.stopping or self.is_due("checkpoint")

    def save(self):
        self.log.append("save")


def run(**given):
    loop = Recorder(**given)
    run_loop(loop)
    return loop


def test_what_is_due_in_its_order():
    want = [1, 2, 3, "drain", "save", 4, "drain", "evaluate", 5]
    assert run().log == [*want, 6, "drain", "evaluate", "save"]  # all at the last step


def test_a_signal_saves_its_step_and_ends():
    loop = run(stop_at=2)
    assert loop.log == [1, 2, "drain", "save"] and not loop.state.unscored
    loop = Recorder(every={"eval": 2, "checkpoint": 9}, stop_at=2)
    loop.interrupted = True
    run_loop(loop)
    assert loop.log == [1, 2, "drain", "evaluate", "save"] and loop.state.unscored


def test_an_evaluation_that_is_owed_comes_first():
    assert run(step=4, owes=True).log[:2] == ["evaluate", 5]
    loop = Recorder(step=4, owes=True)
    loop.interrupted = True
    run_loop(loop)
    assert loop.log == ["evaluate"] and loop.state.unscored and loop.state.stopping


def test_a_rewind_repeats_no_evaluation_and_saves_nothing():
    log = run(bad=[4]).log
    assert log[:8] == [1, 2, 3, "drain", "save", 4, "drain", "rewind"]
    assert log[8:] == [3, "drain", "save", 4, "drain", "evaluate", 5, *log[-4:]]


def test_a_finished_run_does_nothing():
    assert run(step=6).log == []


def test_the_state_is_saved_and_restored_as_one_thing():
    best = BestTracker("eval/valid/f1", None)
    best.add(4, 0.5)
    state = LoopState(step=5, read=5, tokens=70, phases=[{"start": 0}], best=best)
    state.rewinds.append({"from": 4, "to": 2})
    meta = state.to_meta()
    assert meta["best"] == {"metric": "eval/valid/f1", "step": 4, "value": 0.5}
    again = LoopState.from_meta(meta, 5, phases=meta["phases"], best=best)
    assert again == state
    assert LoopState.from_meta({}, 0, best=best) == LoopState(best=best)


class Fake(SimpleNamespace):
    must_rewind = TrainLoop.must_rewind


def fake(**more):
    """What drain and save of a TrainLoop read; every row that is written is in rows."""
    rows, saves = [], []
    parts = dict(
        state=LoopState(step=4, total=9),
        every={"log": 2},
        path=None,
        guard=SimpleNamespace(patience=3, nonfinite="skip", rewinds=1),
        calls=SimpleNamespace(starts=(0,)),
        plan=SimpleNamespace(cost=lambda step: (16, 1e6)),
        meter=SimpleNamespace(
            timed=lambda name, call, *args: call(*args),
            count=lambda *_: None,
            begin=lambda: rows.append("begin"),
            row=lambda gather: {},
        ),
        writers=[SimpleNamespace(write=rows.append)],
        watch=SimpleNamespace(pause=lambda: None),
        clock=None,
        log=lambda text: rows.append(text),
        checkpoints=SimpleNamespace(close=lambda: None, save=saves.append),
        rows=rows,
    )
    loop = Fake(**(parts | more))
    loop._read = lambda values: TrainLoop._read(loop, values)
    return loop


def metrics(loss=1.0, streak=0, stop=0):
    found = {"train/loss": loss, "tokens": 10, "streak": streak, "stop": stop}
    return {key: np.float32(value) for key, value in found.items()}


@pytest.fixture
def drained(monkeypatch):
    monkeypatch.setattr(loops.jax, "device_get", lambda x: x)

    def drain(pending, keep=0, **more):
        loop = fake(pending=loops.deque(pending), **more)
        TrainLoop.drain(loop, keep)
        return loop

    return drain


def test_drain_counts_and_writes_due_rows(drained):
    loop = drained([(i, 1, metrics(loss=i)) for i in range(4)], keep=1)
    assert len(loop.pending) == 1 and loop.state.read == 3 and loop.state.tokens == 30
    assert loop.rows[0] == "begin", "the first program was compiled until then"
    assert [(row["step"], row["train/loss"]) for row in loop.rows[1:]] == [(2, 1.0)]


def test_drain_stops_where_the_run_has_to_go_back(drained):
    loop = drained([(i, 1, metrics(streak=i)) for i in range(1, 6)])
    assert loop.must_rewind and loop.state.read == 3 and len(loop.pending) == 2


def test_drain_hears_of_a_signal_and_of_a_loss_that_is_not_finite(drained):
    assert drained([(1, 1, metrics(stop=1))]).state.stopping
    strict = SimpleNamespace(patience=3, nonfinite="stop", rewinds=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops.manifest, "steps", lambda path: [2])
        with pytest.raises(RunError, match="train/loss not finite; the last good"):
            drained([(1, 1, metrics(loss=np.nan))], guard=strict)
