# SPDX-License-Identifier: Apache-2.0
"""The watch over the other hosts; hosts are threads with a common service."""

import threading
import time

import jax
import pytest

from bertjax import RunError, UserError
from bertjax.parallel.watch import Watch, is_broken_collective

LIMIT = 1.0


class Service:
    """A stand-in for jax's key-value store; it blocks while `silent` is set."""

    def __init__(self):
        self.rows, self.silent = {}, threading.Event()

    def key_value_set(self, key, value, allow_overwrite):
        while self.silent.is_set():
            time.sleep(0.05)
        self.rows[key] = value

    def key_value_dir_get(self, directory):
        return list(self.rows.items())


@pytest.fixture
def pod():
    """Three hosts that watch each other, the service, and the hosts' exit statuses."""
    service, ended = Service(), {}
    watches = [
        Watch(LIMIT, end=lambda code, i=i: ended.setdefault(i, code)) for i in range(3)
    ]
    for i, watch in enumerate(watches):
        watch.start(service, i, 3, lambda: None)
    yield watches, service, ended
    service.silent.clear()
    for watch in watches:
        watch.leaving.set()
        watch.closed.set()


def until(what):
    stop = time.monotonic() + 60  # enough for a busy machine
    while not what() and time.monotonic() < stop:
        time.sleep(0.05)
    assert what()


def test_a_lost_host_ends_the_others(pod, capsys):
    watches, _, ended = pod
    for watch in watches:
        watch.tick(7)
        watch.pause()
    time.sleep(3 * watches[0].interval)
    watches[2].leaving.set()
    watches[2].closed.set()  # it sends no more signs of life
    until(lambda: ended == {0: 1, 1: 1})
    said = capsys.readouterr().err
    assert said.count("error: host 2 gives no sign of life for 1 s (hosts.tim") == 2
    assert "after step 7" in said


def test_a_silent_coordinator(pod, capsys):
    _, service, ended = pod
    service.silent.set()
    until(lambda: ended.keys() >= {1, 2})
    assert "host 0, which coordinates, gives no answer" in capsys.readouterr().err


def test_a_signal_before_training_is_told_to_the_others(pod, capsys):
    watches, _, ended = pod
    watches[0].leave()
    until(lambda: ended.keys() >= {1, 2})
    said = capsys.readouterr().err
    assert said.count("error: host 0 was stopped by a signal before its first") == 2


def test_an_error_is_told_to_the_others(pod, capsys):
    watches, _, ended = pod
    with pytest.raises(UserError, match="disk full"), watches[1]:
        raise UserError("disk full")
    until(lambda: ended == {0: 1, 2: 1})
    assert "host 1 ended: UserError: disk full" in capsys.readouterr().err


def test_a_broken_collective_gets_the_name_of_who_is_gone(pod, capsys):
    watches, _, _ = pod
    watches[2].leaving.set()
    watches[2].closed.set()
    with pytest.raises(RunError, match="host 2 gives no sign of life"), watches[0]:
        raise ValueError("UNKNOWN: Gloo AllReduce failed: Connection closed by peer")
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("ValueError: UNKNOWN: Gloo AllReduce failed")
    assert "looking for the host that is gone" in second


@pytest.mark.parametrize(
    "said, broken",
    [
        ("UNKNOWN: Gloo all-reduce failed: [pair.cc:547] Connection closed", True),
        ("FAILED_PRECONDITION: Error: read: Connection reset by peer", True),
        ("UNAVAILABLE: failed to connect to all addresses", True),
        ("DEADLINE_EXCEEDED: Barrier timed out. Id: sync::1", True),
        ("INTERNAL: NCCL operation ncclAllReduce failed: remote process exited", True),
        ("ABORTED: The following tasks stopped sending heartbeats", True),
        ("INTERNAL: ptxas fatal   : Unresolved extern function '__nv_erff'", False),
        ("INVALID_ARGUMENT: Disallowed host-to-device transfer: aval=f32[]", False),
        ("RESOURCE_EXHAUSTED: Out of memory in NCCL", False),
    ],
)
def test_what_a_broken_collective_says(said, broken):
    assert is_broken_collective(jax.errors.JaxRuntimeError(said)) is broken


def test_other_errors_of_the_runtime_are_not_searched_for(pod, capsys):
    """They are raised at once, without a search for a lost host."""
    watches, _, ended = pod
    begun = time.monotonic()
    with pytest.raises(jax.errors.JaxRuntimeError, match="ptxas"), watches[0]:
        raise jax.errors.JaxRuntimeError("INTERNAL: ptxas fatal")
    # Host 0 waits until the others know of the error, less than the limit.
    assert time.monotonic() - begun < LIMIT
    assert "a collective failed" not in capsys.readouterr().err
    until(lambda: ended.keys() >= {1, 2})


def test_an_error_of_storage_is_no_broken_collective():
    assert not is_broken_collective(ValueError("UNAVAILABLE: storage.googleapis.com"))
    assert not is_broken_collective(UserError("Gloo"))


def test_a_host_that_lives_and_stands_still(pod, capsys):
    watches, _, ended = pod
    for watch in watches:
        watch.tick(5)
    for watch in watches[:2]:
        watch.tick(6)
    until(lambda: 0 in ended)
    assert "host 2 stands still after step 5" in capsys.readouterr().err


def test_before_a_step_was_measured_it_may_take_longer(pod, monkeypatch, capsys):
    """A healthy call of many steps may take longer than the limit, but not forever."""
    watches, _, ended = pod
    for watch in watches:
        watch.tick(1000)
    time.sleep(2 * LIMIT)
    assert not ended and watches[0].longest == 0
    monkeypatch.setattr("bertjax.parallel.watch.FIRST", 3.0)
    until(lambda: ended.keys() >= {1, 2})
    said = capsys.readouterr().err
    assert "no host finished a step for 3 s (hosts.timeout): all of them after" in said


def test_a_lost_host_is_found_before_a_step_was_measured(pod, capsys):
    watches, _, ended = pod
    for watch in watches:
        watch.tick(1000)
    watches[2].leaving.set()
    watches[2].closed.set()
    until(lambda: ended == {0: 1, 1: 1})
    assert "host 2 gives no sign of life for 1 s" in capsys.readouterr().err


def test_slow_compiles_evaluations_and_saves_are_no_loss(pod):
    watches, _, ended = pod
    for watch in watches:
        watch.tick(1, steady=False)
    watches[0].tick(2)
    watches[0].pause()
    watches[1].longest = LIMIT  # the longest step so far; ten times that is allowed
    watches[1].tick(2)
    time.sleep(1.5 * LIMIT)
    assert not ended and watches[0].verdict() is None


def test_hosts_that_are_done_leave(pod):
    watches, _, ended = pod
    for watch in watches[1:]:
        with watch:
            pass
    time.sleep(1.5 * LIMIT)
    assert not ended and watches[0].verdict() is None


def test_alone_it_does_nothing():
    with pytest.raises(ValueError), Watch(1.0) as watch:
        watch.tick(1)
        raise ValueError("Gloo")
