# SPDX-License-Identifier: Apache-2.0
"""The loop of a single run: how it reads metrics and saves, without a run."""

import contextlib
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from bertjax import RunError
from bertjax.assembly import train_loop
from bertjax.assembly.batches import Run
from bertjax.assembly.train_loop import TrainLoop
from bertjax.data.batches import PhasedBatches
from bertjax.data.loader import stream
from bertjax.data.phases import Phase
from bertjax.training.loop import LoopState


class Fake(SimpleNamespace):
    must_rewind = TrainLoop.must_rewind


def fake(**more):
    """Make an object with what TrainLoop.drain and save read; `rows` gets all rows."""
    rows, saves = [], []
    parts = dict(
        state=LoopState(step=4, total=9),
        every={"log": 2},
        path=None,
        guard=SimpleNamespace(patience=3, nonfinite="skip", rewinds=1),
        calls=SimpleNamespace(starts=(0,)),
        cost=lambda step: (16, 1e6),
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
    monkeypatch.setattr(train_loop.jax, "device_get", lambda x: x)

    def drain(pending, keep=0, **more):
        loop = fake(pending=train_loop.deque(pending), **more)
        TrainLoop.drain(loop, keep)
        return loop

    return drain


def test_an_interrupted_run_leaves_no_threads(monkeypatch):
    """A notebook continues, and its last traceback keeps a reference to the loop."""

    def interrupted(loop):
        next(loop.source)
        raise KeyboardInterrupt

    monkeypatch.setattr(train_loop, "run_loop", interrupted)
    trace, source = contextlib.nullcontext(), stream(lambda step: {}, 0, 9)
    loop = fake(stop=SimpleNamespace(), trace=trace, source=source)
    with pytest.raises(KeyboardInterrupt):
        TrainLoop.train(loop)
    assert not [t for t in threading.enumerate() if t.name.startswith("batches")]


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
        patch.setattr(train_loop.manifest, "steps", lambda path: [2])
        with pytest.raises(RunError, match="train/loss not finite; the last good"):
            drained([(1, 1, metrics(loss=np.nan))], guard=strict)


def test_rows_are_read_before_a_phase_compiles():
    """Otherwise the last row of a phase includes the compilation, or its last update,
    which the devices compute meanwhile, takes no time."""
    calls = []

    def update(state, batch):
        calls.append("update")
        return state, {}

    part = SimpleNamespace(update=SimpleNamespace(step=update))
    config = SimpleNamespace(steps_per_call=1)
    phased = SimpleNamespace(at=lambda step: SimpleNamespace(objective=""))
    loop = fake(
        run=SimpleNamespace(parts={"": part}, config=config),
        planned=SimpleNamespace(data=phased),
        calls=SimpleNamespace(starts=(0, 4), size=lambda step: 1),
        trace=SimpleNamespace(update=lambda *_: contextlib.nullcontext()),
        watch=SimpleNamespace(tick=lambda *_, **__: None),
        stop=SimpleNamespace(number=0),
        alone=True,
        batches=iter([{}, {}]),
        train_state=None,
        pending=train_loop.deque(),
        drain=lambda keep=0: calls.append(f"drain, keep {keep}"),
    )
    TrainLoop.update(loop)
    TrainLoop.update(loop)
    assert calls == ["drain, keep 0", *["update", "drain, keep 1"] * 2]


def test_going_back_is_no_loss_of_a_host(monkeypatch):
    """The watch pauses, as reading a large checkpoint may take longer than a step."""
    calls = []
    loop = fake(
        primary=True,
        watch=SimpleNamespace(pause=lambda: calls.append("pause")),
        checkpoints=SimpleNamespace(wait=lambda: calls.append("wait")),
    )
    monkeypatch.setattr(train_loop.manifest, "newest_before", lambda *_: None)
    with pytest.raises(RunError, match="the last good checkpoint is none"):
        TrainLoop.rewind(loop)
    assert calls == ["pause", "wait"]


@pytest.mark.parametrize("step, scored", [(0, "clm"), (4, "clm"), (5, "")])
def test_a_resumed_run_is_scored_by_the_phase_that_ends_there(step, scored):
    """Its recorded phases name the objective; its batches begin with the next phase."""
    phases = tuple(Phase(at, 0, 9, 8, 32, None, x) for at, x in ((0, "clm"), (4, "")))
    phased = PhasedBatches((SimpleNamespace(start=4, objective=""),))
    rows = SimpleNamespace(eval_batches=lambda *_: None)
    parts = {
        name: SimpleNamespace(
            valid={"valid": rows}, evaluate=lambda name=name, **_: name
        )
        for name in ("clm", "")
    }
    loop = fake(
        planned=Run(phased, 8, phases),
        run=SimpleNamespace(
            mesh=None,
            parts=parts,
            eval_rows=8,
            config=SimpleNamespace(eval=SimpleNamespace(ema=False, examples=0)),
        ),
        train_state=SimpleNamespace(params=None, ema=None, frozen=None),
        state=LoopState(step=step, total=8),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_loop.feed, "local_rows", lambda *_: None)
        patch.setattr(train_loop.feed, "to_devices", lambda *_: ())
        patch.setattr(train_loop.feed, "with_flag", lambda *_: ())
        patch.setattr(
            train_loop.step, "run_eval", lambda evaluate, *_: {"by": evaluate()}
        )
        assert TrainLoop._score(loop) == {"valid": {"by": scored}}
