# SPDX-License-Identifier: Apache-2.0
"""Measure a config: python -m bertjax.benchmark --config=... --what=step|input|loop|...

step       one update on synthetic full rows; needs no data
input      the host's batch function, and masking alone; a made-up text if there is none
loop       bertjax.train itself, without checkpoints, against its own bare step
fill_mask  latency of one text of 32 and of 128 tokens, with random parameters

`--peer=FILE` measures against another program: both run as processes of their own,
pinned to one core, and take turns, so that only one computes at a time. The peer is
started as `python FILE SHAPE`, SHAPE being JSON; it speaks first, when its first
step has run, then answers each line on its stdin (a number of steps) with one line:
{"seconds": {"step": seconds a step, ...}, "peak_rss_mb": ...}.
"""

import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, build, registry
from bertjax import config as c

VOCAB_SIZE = 30522  # of synthetic rows, unless model.vocab_size says otherwise
ROUND_SECONDS = 4.0  # a round is as many steps as fill this
SETTLE = 3  # steps of the loop that are not counted after it stood still
Seconds = dict[str, float]


class Measured(NamedTuple):
    """Something that can be timed again and again.

    facts: what is known before; `tokens` is the slots of one step. run(n) does n
    steps and returns the mean seconds of one, by what was timed ("step", ...).
    """

    facts: dict[str, Any]
    run: Callable[[int], Seconds]


def define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string("what", "step", "", flag_values=values)
    flags.DEFINE_string("peer", None, "", flag_values=values)
    flags.DEFINE_integer("rounds", 5, "", lower_bound=1, flag_values=values)
    flags.DEFINE_boolean("json", False, "", flag_values=values)
    # Speak the line protocol on stdin and stdout: what a comparison starts.
    flags.DEFINE_boolean("serve", False, "", flag_values=values)


def main(argv: Sequence[str]) -> int:
    args = c.parse(argv, define_flags)
    config = args.config
    c.check(config)
    make = registry.pick("--what", args.what, MEASURES)
    if args.what == "loop" and not config.data.train:
        config.data.train = "builtin:docs"
    if args.serve:
        serve(make(config))
        return 0
    if args.peer or args.what == "loop":
        if args.peer and not os.path.isfile(args.peer):
            raise UserError(f"--peer={args.peer}: no such file")
        results = compare(argv, config, args.what, args.peer, args.rounds)
    else:
        measured = make(config)
        steps = steps_a_round(measured.run(1))
        times = [measured.run(steps) for _ in range(args.rounds)]
        results = summarise(measured.facts, times, peak_rss_mb())
    if args.json:
        print(json.dumps(results))
    else:
        for key, value in results.items():
            said = f"{value:.6g}" if isinstance(value, float) else value
            print(f"{key:28} {said}")
    return 0


# ---------------------------------------------------------------- what is measured
def measure_step(config: ConfigDict) -> Measured:
    """Time the jitted update on one batch that lies on the devices."""
    import jax

    from bertjax.models.config import flops_per_token
    from bertjax.objectives.base import make_objective
    from bertjax.parallel import feed
    from bertjax.parallel.mesh import make_mesh, peak_flops
    from bertjax.training import state

    mesh = make_mesh(**config.mesh)
    feed.check_batch_size(mesh, config.batch_size, config.accumulate)
    cfg = c.encoder_config(config, config.model.vocab_size or VOCAB_SIZE)
    objective, cfg = make_objective(config.objective, cfg)
    # Far from the end of any schedule: the arithmetic of a step is always the same.
    update = build.make_update(config, objective, mesh, 10_000, 1_000_000)
    current = state.born(update.init, update.tx, mesh, update.shardings)
    rows = synthetic_batch(config, cfg.vocab_size)
    local = feed.local_rows(mesh, config.batch_size)
    rows = {name: array[local] for name, array in rows.items()}
    batch = next(feed.to_devices([rows], mesh, config.batch_size))
    with jax.set_mesh(mesh):
        begun = time.perf_counter()
        compiled = update.step.lower(current, batch).compile()
        compile_seconds = time.perf_counter() - begun

    def run(steps: int) -> Seconds:
        nonlocal current
        begun = time.perf_counter()
        for _ in range(steps):
            current, metrics = compiled(current, batch)
        jax.block_until_ready((current, metrics))
        return {"step": (time.perf_counter() - begun) / steps}

    run(1)
    per_token = flops_per_token(cfg, config.data.length, predictions(config))
    facts = {
        "tokens": config.batch_size * config.data.length,
        "compile_seconds": compile_seconds,
        "flops_per_token": per_token,
        "parameters": sum(x.size for x in jax.tree.leaves(update.shapes.params)),
        "device_kind": mesh.devices.flat[0].device_kind,
    }
    if memory := compiled.memory_analysis():
        facts["temporary_mb"] = memory.temp_size_in_bytes / 1e6
    if peak := peak_flops(mesh):
        facts["peak_flops"] = peak
    return Measured(facts, run)


def measure_input(config: ConfigDict) -> Measured:
    """Time the host's batch function, and masking alone, in one thread."""
    from bertjax.data.masking import mask_tokens

    batches = input_batches(config)
    unmasked = [_unmasked(batches, i) for i in range(4)]

    def mask(step: int) -> None:
        ids, real, keys = unmasked[step % len(unmasked)]
        mask_tokens(ids, real, keys, batches.masking, batches.tables, batches.P)

    at = 0

    def run(steps: int) -> Seconds:
        nonlocal at
        begun = time.perf_counter()
        for i in range(steps):
            batches.batch(at + i)
        made = time.perf_counter()
        for i in range(steps):
            mask(i)
        masked = time.perf_counter()
        at += steps
        return {"step": (made - begun) / steps, "masking": (masked - made) / steps}

    run(1)
    return Measured(_facts(config, batches.tables.vocab_size), run)


def measure_loop(config: ConfigDict) -> Measured:
    """Run bertjax.train, whose last writer (`Pacer`) speaks for it; does not return.

    Every step is logged, none evaluated or saved.
    """
    from bertjax import train

    config.total = c.duration(steps=1_000_000_000)
    config.log.every = c.duration(steps=1)
    config.checkpoint.every = c.duration(steps=1_000_000_000)
    config.log.writers += ",bertjax.benchmark.Pacer"
    config.data.valid = ""
    Pacer.facts = _facts(config, VOCAB_SIZE)
    raise SystemExit(train.train(config, tempfile.mkdtemp()))


def measure_fill_mask(config: ConfigDict) -> Measured:
    """Time filling one blank of a text, from ids to probabilities."""
    import jax

    from bertjax.fill_mask import make_filler
    from bertjax.objectives.base import make_objective

    config.objective = "mlm"
    cfg = c.encoder_config(config, config.model.vocab_size or VOCAB_SIZE)
    objective, cfg = make_objective("mlm", cfg)
    params = jax.jit(objective.init)(jax.random.key(config.seed))
    pieces = [str(i) for i in range(cfg.vocab_size)]
    tokenizer = SimpleNamespace(
        vocab_size=cfg.vocab_size, pieces=pieces, pad_id=0, mask_id=1
    )
    fill = make_filler(cfg, params, tokenizer, 5)
    texts = {
        n: [1, *(2 + i % (cfg.vocab_size - 2) for i in range(n - 1))] for n in (32, 128)
    }
    begun = time.perf_counter()
    for ids in texts.values():
        fill(ids)
    facts = _facts(config, cfg.vocab_size) | {"tokens": 128}
    facts["compile_seconds"] = time.perf_counter() - begun

    def run(steps: int) -> Seconds:
        seconds = {}
        for n, ids in texts.items():
            begun = time.perf_counter()
            for _ in range(steps):
                fill(ids)
            seconds[f"latency_{n}"] = (time.perf_counter() - begun) / steps
        return seconds | {"step": seconds["latency_128"]}

    return Measured(facts, run)


MEASURES = {
    "step": measure_step,
    "input": measure_input,
    "loop": measure_loop,
    "fill_mask": measure_fill_mask,
}


# ---------------------------------------------------------------- made-up inputs
def predictions(config: ConfigDict) -> int:
    """Return P, the prediction slots of a row."""
    from bertjax.data import masking as m

    if config.data.max_predictions is not None:
        return config.data.max_predictions
    preset = m.make_masking(config.data.masking, rate=config.data.mask_rate)
    return m.predictions_per_sequence(preset.rate, config.data.length)


def zipf_ids(shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
    """Draw ids i32 in [low, high), the k-th as often as 1/k: like words of a text."""
    draws = np.random.default_rng(0).random(shape)
    return (low - 1 + (high - low + 1) ** draws).astype(np.int32)


def synthetic_batch(config: ConfigDict, vocab_size: int) -> dict[str, np.ndarray]:
    """Make a batch [B, L] of full rows with P predictions each, for every objective."""
    b, length, p = config.batch_size, config.data.length, predictions(config)
    ids = zipf_ids((b, length), 5, vocab_size)
    positions = np.linspace(1, length - 2, p).astype(np.int32)
    halves = (np.arange(length) >= length // 2).astype(np.int32)
    return {
        "input_ids": ids,
        "attention_mask": np.ones((b, length), np.int32),
        "token_type_ids": np.tile(halves, (b, 1)),
        "mlm_positions": np.tile(positions, (b, 1)),
        "mlm_ids": ids[:, positions],
        "mlm_weights": np.ones((b, p), np.float32),
        "nsp_labels": np.arange(b, dtype=np.int32) % 2,
    }


def input_batches(config: ConfigDict) -> Any:
    """Make the batch function of the config's text, or of a made-up one."""
    if config.data.train:
        build.check_inputs(config)
        prepared = build.prepare(config, lambda text: print(text, file=sys.stderr))
        tokenizer, store = prepared.tokenizer, prepared.train
    else:
        tokenizer, store = synthetic_text(config.model.vocab_size or VOCAB_SIZE)
    needs = {"mlm", "nsp"} if "nsp" in config.objective.split("+") else {"mlm"}
    return build.make_batches(config, frozenset(needs), tokenizer, store)


def synthetic_text(vocab_size: int) -> tuple[Any, Any]:
    """Make a tokenizer's tables and a store: 2M tokens, 24 a sentence, 20 of them a
    document."""
    ids = zipf_ids((2_000_000,), 5, vocab_size)
    sentences = np.arange(0, ids.size + 1, 24)
    tokenizer = SimpleNamespace(
        vocab_size=vocab_size,
        pad_id=0,
        unk_id=1,
        cls_id=2,
        sep_id=3,
        mask_id=4,
        special_ids=np.arange(5),
        replacement_ids=np.arange(5, vocab_size, dtype=np.int32),
        word_starts=np.arange(vocab_size) % 4 > 0,
    )
    store = SimpleNamespace(
        tokens=ids[: sentences[-1]].astype(np.uint32),
        sentences=sentences,
        documents=np.append(np.arange(0, sentences.size - 1, 20), sentences.size - 1),
        counts=np.bincount(ids, minlength=vocab_size),
    )
    return tokenizer, store


def _unmasked(batches: Any, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make rows that mask_tokens takes: ids, real-token flags, keys."""
    from bertjax.data import counter

    batch = batches.batch(step)
    ids = batch["input_ids"].copy()
    row, slot = np.nonzero(batch["mlm_weights"])
    ids[row, batch["mlm_positions"][row, slot]] = batch["mlm_ids"][row, slot]
    keys = counter.fold(batches.seed, "benchmark", np.arange(len(ids)) + step)
    return ids, batch["attention_mask"], keys


def _facts(config: ConfigDict, vocab_size: int) -> dict[str, Any]:
    """Return what is known of a config without compiling anything."""
    from bertjax.models.config import flops_per_token

    cfg = c.encoder_config(config, config.model.vocab_size or vocab_size)
    length = config.data.length
    return {
        "tokens": config.batch_size * length,
        "compile_seconds": 0.0,
        "flops_per_token": flops_per_token(cfg, length, predictions(config)),
    }


# ---------------------------------------------------------------- results
def peak_rss_mb() -> float:
    """Return the most memory this process had, MB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def steps_a_round(seconds: Seconds) -> int:
    """Return how many steps fill a round."""
    return max(1, math.ceil(ROUND_SECONDS / sum(seconds.values())))


def summarise(
    facts: dict[str, Any], times: list[Seconds], peak: float
) -> dict[str, Any]:
    """Return medians over rounds, and the spread of the step.

    >>> facts = {"tokens": 100}
    >>> summarise(facts, [{"step": 0.1}, {"step": 0.2}, {"step": 0.4}], 7.0)
    {'tokens_per_second': 500.0, 'step_ms': 200.0, 'step_ms_min': 100.0, \
'step_ms_max': 400.0, 'peak_rss_mb': 7.0}
    """
    facts = dict(facts)
    tokens, peak_flops = facts.pop("tokens"), facts.pop("peak_flops", None)
    found = {key: [t[key] for t in times] for key in times[0]}
    step = found.pop("step", None) or next(iter(found.values()))
    median = statistics.median(step)
    results = {
        "tokens_per_second": tokens / median,
        "step_ms": 1e3 * median,
        "step_ms_min": 1e3 * min(step),
        "step_ms_max": 1e3 * max(step),
        "peak_rss_mb": peak,
        **facts,
    }
    if peak_flops:
        results["mfu"] = tokens * facts["flops_per_token"] / median / peak_flops
    for key, seconds in found.items():
        results[f"{key}_ms"] = 1e3 * statistics.median(seconds)
    if "masking" in found:
        masking = statistics.median(found["masking"])
        results["masking_tokens_per_second"] = tokens / masking
    if "wait" in found:
        results["wait_ratio"] = statistics.median(found["wait"]) / median
    return results


# ---------------------------------------------------------------- taking turns
def serve(measured: Measured) -> None:
    """Answer requests on stdin until it ends; the first line says what is measured."""
    speak(measured.facts)
    for line in sys.stdin:
        speak({"seconds": measured.run(int(line)), "peak_rss_mb": peak_rss_mb()})


def speak(reply: dict[str, Any]) -> None:
    """Write a line of the protocol."""
    print(json.dumps(reply), flush=True)


class Pacer:
    """A writer of metrics that lets the loop run as many steps as stdin says.

    The steps in flight and batches made ahead while it stood still are not counted.
    """

    facts: dict[str, Any]

    def __init__(self, workdir: Any, step: int) -> None:
        self.rows: list[tuple[float, float]] = []
        self.wanted = 0

    def write(self, row: dict[str, Any]) -> None:
        self.rows.append((time.perf_counter(), row.get("data/wait_seconds", 0.0)))
        if row["step"] == 1:
            speak(self.facts)
        elif len(self.rows) < self.wanted:
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
            os._exit(0)  # the comparison is over, and cleans up the workdir
        self.rows, self.wanted = [], int(line) + SETTLE

    def rest(self) -> None:
        """Wait for the step in flight: it must not compute in the other's turn."""
        import jax

        jax.block_until_ready(jax.live_arrays())

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class Turn:
    """A process that computes when it is asked to.

    first_step_seconds: from its start to the end of its first step.
    """

    def __init__(self, name: str, command: list[str], temporary: str) -> None:
        self.name = name
        begun = time.perf_counter()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TMPDIR": temporary},
            text=True,
        )
        self.facts = self._read()
        self.first_step_seconds = time.perf_counter() - begun
        self.times: list[Seconds] = []
        self.peak_rss_mb = 0.0
        self.steps = 1

    def _read(self) -> dict[str, Any]:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise UserError(f"{self.name} ended with status {self.process.wait()}")

    def round(self) -> Seconds:
        """Let it compute for a round."""
        self.process.stdin.write(f"{self.steps}\n")
        self.process.stdin.flush()
        reply = self._read()
        self.peak_rss_mb = reply["peak_rss_mb"]
        return reply["seconds"]

    def end(self) -> None:
        """Close its stdin, at which it ends."""
        self.process.stdin.close()
        self.process.wait()


def compare(
    argv: Sequence[str], config: ConfigDict, what: str, peer: str | None, rounds: int
) -> dict[str, Any]:
    """Let ours and a peer (the loop's: the bare step) take turns on one core.

    Ratios of times are the peer's over ours, the median over rounds; those of memory
    and of the time to the first step are ours over the peer's.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    module = [sys.executable, "-m", "bertjax.benchmark", "--serve"]
    with tempfile.TemporaryDirectory() as temporary:
        ours = Turn("bertjax", [*module, *argv], temporary)
        vocab_size = config.model.vocab_size or VOCAB_SIZE
        if what == "loop":  # which has just prepared its text
            vocab_size = build.prepare(config, lambda text: None).tokenizer.vocab_size
            vocab_size = c.encoder_config(config, vocab_size).vocab_size
        if peer:
            command = [sys.executable, peer, json.dumps(shape(config, vocab_size))]
        else:
            given = f"--config.model.vocab_size={vocab_size}"
            command = [*module, *argv, "--what=step", given]
        other = Turn(peer or "the bare step", command, temporary)
        for turn in (ours, other):
            turn.steps = steps_a_round(turn.round())
        for _ in range(rounds):
            for turn in (ours, other):
                turn.times.append(turn.round())
        for turn in (ours, other):
            turn.end()
    results = summarise(ours.facts, ours.times, ours.peak_rss_mb)
    theirs = summarise({**other.facts}, other.times, other.peak_rss_mb)
    key = next(k for k in other.times[0] if k in ours.times[0])
    pairs = zip(ours.times, other.times, strict=True)
    ratios = [b[key] / a[key] for a, b in pairs]
    return {
        **results,
        "first_step_seconds": ours.first_step_seconds,
        "peer": {**theirs, "first_step_seconds": other.first_step_seconds},
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "peak_rss_ratio": ours.peak_rss_mb / other.peak_rss_mb,
        "first_step_ratio": ours.first_step_seconds / other.first_step_seconds,
    }


def shape(config: ConfigDict, vocab_size: int) -> dict[str, Any]:
    """Describe a config to a peer, in Hugging Face's names."""
    cfg = c.encoder_config(config, vocab_size)
    names = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "type_vocab_size",
        "layer_norm_eps",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "dtype",
    )
    return {name: getattr(cfg, name) for name in names} | {
        "batch_size": config.batch_size,
        "length": config.data.length,
        "predictions": predictions(config),
        "lr": config.optim.lr,
        "wd": config.optim.wd,
    }


if __name__ == "__main__":
    from bertjax import benchmark  # Pacer's facts are kept in the module of this name

    c.command(benchmark.main)
