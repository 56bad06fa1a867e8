# SPDX-License-Identifier: Apache-2.0
"""Compare two programs by running them in turn, on a CPU on one core.

The peer is started as `python FILE SHAPE ARGUMENT ...`, where SHAPE is JSON. It writes
the first line when its first step has run. Then it answers each line of its stdin (a
number of steps) with one line: {"seconds": {"step": seconds per step, ...},
"peak_rss_mb": ...}.
"""

import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.assembly import prepared_text, resolve
from bertjax.data.masking import mask_rates
from bertjax.measuring.results import (
    Measured,
    Seconds,
    peak_rss_mb,
    spread,
    steps_a_round,
    summarize,
)
from bertjax.measuring.synthetic_data import (
    Shape,
    batch_specs,
    expected_vocab_size,
    one_phase,
)
from bertjax.training.writer import Writer

SETTLE = 3  # steps of the loop after a pause that do not count


def speak(reply: dict[str, Any]) -> None:
    """Write a line of the protocol."""
    print(json.dumps(reply), flush=True)


class Pacer(Writer):
    """A metrics writer that lets the loop run the number of steps that stdin requests.

    Steps in flight, and batches prepared during a pause, do not count.
    """

    facts: dict[str, Any]

    def __init__(self, workdir: Any, step: int) -> None:
        self.rows: list[tuple[float, float]] = []
        self.target = 0

    def write(self, row: dict[str, Any]) -> None:
        self.rows.append((time.perf_counter(), row.get("data/wait_seconds", 0.0)))
        if row["step"] == 1:
            speak(self.facts)
        elif len(self.rows) < self.target:
            return
        else:
            (begun, _), *counted = self.rows[SETTLE - 1 :]
            seconds = {
                "step": (counted[-1][0] - begun) / len(counted),
                "wait": statistics.mean(w for _, w in counted),
            }
            self.rest()
            speak({"seconds": seconds, "peak_rss_mb": peak_rss_mb()})
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # the comparison is over, and removes the workdir
        self.rows, self.target = [], int(line) + SETTLE

    def rest(self) -> None:
        """Wait for the step in flight, which must not run during the other's turn."""
        import jax

        jax.block_until_ready(jax.live_arrays())


def serve(measured: Measured) -> None:
    """Answer requests on stdin until it ends, after a first line with the facts."""
    speak(measured.facts)
    for line in sys.stdin:
        speak({"seconds": measured.run(int(line)), "peak_rss_mb": peak_rss_mb()})


def processor_seconds(pid: int) -> float:
    """Return a process's processor time so far; 0 without /proc."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Contender:
    """A process that computes on request."""

    def __init__(self, name: str, command: list[str], temporary: str) -> None:
        self.name = name
        begun = time.perf_counter()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Otherwise it would also reserve the other's share of a GPU's memory.
            env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
            | {"TMPDIR": temporary},
            text=True,
        )
        self.facts = self._read()
        self.first_step_seconds = time.perf_counter() - begun
        self.times: list[Seconds] = []
        self.busy: list[float] = []  # processor seconds per step, for each round
        self.peak_rss_mb = 0.0

    def _read(self) -> dict[str, Any]:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise UserError(f"{self.name} ended with status {self.process.wait()}")

    def run(self, steps: int) -> Seconds:
        """Let it compute `steps` steps."""
        before = processor_seconds(self.process.pid)
        with contextlib.suppress(BrokenPipeError):  # it has ended, which _read reports
            self.process.stdin.write(f"{steps}\n")
            self.process.stdin.flush()
        reply = self._read()
        self.peak_rss_mb = reply["peak_rss_mb"]
        self.busy.append((processor_seconds(self.process.pid) - before) / steps)
        return reply["seconds"]

    def end(self) -> None:
        """Close its stdin, which ends it."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()

    def summarize(self) -> dict[str, Any]:
        """Return the figures of its rounds."""
        return {
            **summarize(self.facts, self.times, self.peak_rss_mb),
            "first_step_seconds": self.first_step_seconds,
        }


def compare(
    argv: Sequence[str], config: ConfigDict, what: str, peer: str | None, rounds: int
) -> dict[str, Any]:
    """Run ours and a peer (for the loop: the bare step) in turn, on a CPU on one core.

    Ratios of times are the peer's over ours, the median over rounds. Ratios of memory
    and of the time to the first step are ours over the peer's. On a CPU processor_ratio
    is the ratio of the processes' own processor times, which other jobs hardly change.
    """
    backend = find_backend()
    if backend == "cpu" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    module = [sys.executable, "-m", "bertjax.benchmark", "--serve"]
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        ours = Contender("bertjax", [*module, *argv], temporary)
        stack.callback(ours.end)
        vocab_size = expected_vocab_size(config)
        if what == "loop":  # it has just prepared its text
            tokenizer = prepared_text.prepare(config, lambda text: None).tokenizer
            cfg = resolve.encoder_config(config, tokenizer.vocab_size)
            vocab_size = cfg.vocab_size
        if peer:
            file, *arguments = split(peer)
            shape = json.dumps(describe_shape(config, vocab_size, backend))
            command = [sys.executable, file, shape, *arguments]
        else:
            size = f"--config.model.vocab_size={vocab_size}"
            command = [*module, *argv, "--what=step", size]
        other = Contender(peer or "the bare step", command, temporary)
        stack.callback(other.end)
        both = {one: steps_a_round(one.run(1)) for one in (ours, other)}
        for _ in range(rounds):
            for one, steps in both.items():
                one.times.append(one.run(steps))
    key = next(k for k in other.times[0] if k in ours.times[0])
    pairs = zip(ours.times, other.times, strict=True)
    results, peer_results = ours.summarize(), other.summarize()
    # A loop's rounds include steps that do not count.
    if backend == "cpu" and what != "loop" and all(ours.busy[1:]):
        for one, found in ((ours, results), (other, peer_results)):
            found["processor_ms"] = 1e3 * statistics.median(one.busy[1:])
        ratios = [b / a for a, b in zip(ours.busy[1:], other.busy[1:], strict=True)]
        results["processor_ratio"] = statistics.median(ratios)
    return {
        **results,
        "peer": peer_results,
        **spread([b[key] / a[key] for a, b in pairs]),
        "peak_rss_ratio": ours.peak_rss_mb / other.peak_rss_mb,
        "first_step_ratio": ours.first_step_seconds / other.first_step_seconds,
    }


def split(peer: str) -> list[str]:
    """Split --peer into its file and arguments; the file's name may have spaces."""
    peer = os.path.expanduser(peer)
    if os.path.isfile(peer):
        return [peer]
    try:
        return shlex.split(peer) or [peer]
    except ValueError:
        return [peer]


def find_backend() -> str:
    """Return jax's default backend, found by a process that then releases it."""
    code = "import jax; print(jax.default_backend())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UserError(f"jax finds no device: {' '.join(done.stderr.split())[-300:]}")
    return done.stdout.split()[-1]


def describe_shape(config: ConfigDict, vocab_size: int, backend: str) -> dict[str, Any]:
    """Describe a config to a peer, with Hugging Face's names."""
    config = one_phase(config)
    cfg = resolve.encoder_config(config, vocab_size, backend)
    more = {}
    if cfg.num_decoder_layers:
        more = {"num_decoder_layers": cfg.num_decoder_layers}
        more |= {"mlp_type": cfg.mlp_type, "targets": target_slots(config)}
    names = "hidden_size num_hidden_layers num_attention_heads intermediate_size"
    names += " vocab_size max_position_embeddings type_vocab_size layer_norm_eps"
    names += " hidden_dropout_prob attention_probs_dropout_prob dtype"
    return {name: getattr(cfg, name) for name in names.split()} | {
        "batch_size": config.batch_size,
        "length": config.data.length,
        "predictions": mask_rates.predictions(
            config.data, config.data.length, (config.data.mask_rate,)
        ),
        "lr": config.optim.lr,
        "wd": config.optim.wd,
        **more,
    }


def target_slots(config: ConfigDict) -> int:
    """Return the number of tokens per row that a decoder predicts."""
    objective = resolve.objectives_of(config)[""]
    shape = Shape(config.batch_size, config.data.length, (config.data.mask_rate,))
    return batch_specs(config, objective, shape)["lm_ids"].shape[-1]
