# SPDX-License-Identifier: Apache-2.0
"""The training loop alone: the order of its actions, and the state that is saved."""

from bertjax.checkpoints.best import BestTracker
from bertjax.training.loop import Loop, LoopState, run_loop


class Recorder(Loop):
    """A loop that records its actions; stop_at: the step after which a signal comes."""

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
    assert run().log == [*want, 6, "drain", "evaluate", "save"]  # all due at the end


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
    best.scores.append((4, 0.5))
    state = LoopState(step=5, read=5, tokens=70, phases=[{"start": 0}], best=best)
    state.rewinds.append({"from": 4, "to": 2})
    meta = state.to_meta()
    assert meta["best"] == {"metric": "eval/valid/f1", "step": 4, "value": 0.5}
    again = LoopState.from_meta(meta, 5, phases=meta["phases"], best=best)
    assert again == state
    assert LoopState.from_meta({}, 0, best=best) == LoopState(best=best)
