# SPDX-License-Identifier: Apache-2.0
"""Time the step, the input, the loop, filling a blank, packing, or planning."""

import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.assembly import batches as run_batches
from bertjax.assembly import prepared_text, resolve
from bertjax.config import cli, durations
from bertjax.data.features.base import count_slots, count_text, encoder_length
from bertjax.measuring.alternate import Pacer
from bertjax.measuring.results import (
    Measured,
    Seconds,
    mean_seconds,
    memory_mb,
    watch_memory,
)
from bertjax.measuring.synthetic_data import (
    Shape,
    batch_specs,
    expected_vocab_size,
    one_phase,
    synthetic_batch,
    synthetic_store,
    synthetic_text,
    with_row_sizes,
)
from bertjax.measuring.writing_speed import measure_generate

MAX_STEPS = 1_000_000_000  # steps


def measure_step(config: ConfigDict) -> Measured:
    """Time the jitted update on one batch that is on the devices already."""
    import jax

    phases, config = config.phases, with_row_sizes(one_phase(config))
    length = config.data.length
    if phases:
        size = f"{config.batch_size} rows of {length} tokens"
        cli.say(f"measuring the phase with the longest rows: {size}")
    vocab_size = expected_vocab_size(config)
    objective, _ = make_objective(config, vocab_size, jax.default_backend())
    shape = Shape(config.batch_size, length, (config.data.mask_rate,))
    batch = synthetic_batch(config, objective, shape, vocab_size)
    run, facts = compile_step(config, [batch], vocab_size)
    return Measured(facts, lambda steps: {"step": run(steps)})


def make_objective(
    config: ConfigDict, vocab_size: int, backend: str = "cpu"
) -> tuple[Any, Any]:
    """Build the objective and the encoder's config for a backend, without using it."""
    from bertjax.assembly.open_teacher import make_measured_objective

    cfg = resolve.encoder_config(config, vocab_size, backend)
    return make_measured_objective(config, cfg)


def compile_step(
    config: ConfigDict, batches: Sequence[Mapping[str, np.ndarray]], vocab_size: int
) -> tuple[Callable[[int], float], dict[str, Any]]:
    """Compile the update for these batches [B, ...] and run it once.

    Returns run(n), which cycles through the batches and returns the mean seconds per
    step, and the facts known about it.
    """
    import jax

    from bertjax.assembly import train_step
    from bertjax.models import attention
    from bertjax.parallel import feed
    from bertjax.parallel.mesh import make_mesh, peak_flops
    from bertjax.training import multi_step

    mesh = make_mesh(**config.mesh)
    objective, cfg = make_objective(config, vocab_size, jax.default_backend())
    group = objective.group
    feed.check_batch_size(mesh, config.batch_size, config.accumulate, group)
    update = train_step.make_update(config, objective, mesh, *train_step.ENDLESS)
    current = update.begin(mesh, made_up=True)
    rows = feed.local_rows(mesh, config.batch_size)
    local = [{name: array[rows] for name, array in b.items()} for b in batches]
    sizes, most = itertools.repeat(config.batch_size), config.steps_per_call
    call, fed = update.step, feed.to_devices(local, mesh, sizes)
    if most > 1:
        call, counts = update.many, [most] * len(local)
        source = itertools.cycle(local)
        fed = multi_step.to_devices(source, mesh, sizes, counts, most)
    on_devices = [*fed]
    with jax.set_mesh(mesh):
        lengths = [encoder_length(config.data.length, batches[0])]
        backend = attention.describe_backend(cfg, lengths, batches[0])
        begun = time.perf_counter()
        compiled = call.lower(current, on_devices[0]).compile()
        compile_seconds = time.perf_counter() - begun

    def run(steps: int) -> float:
        nonlocal current
        calls = -(-steps // most)
        begun = time.perf_counter()
        for i in range(calls):
            current, metrics = compiled(current, on_devices[i % len(on_devices)])
        jax.block_until_ready((current, metrics))
        return (time.perf_counter() - begun) / (calls * most)

    run(1)
    tokens = batches[0]["input_ids"].size
    facts = {
        "tokens": tokens,  # over all choices of a row
        "compile_seconds": compile_seconds,
        "parameters": sum(x.size for x in jax.tree.leaves(update.params)),
        "dtype": cfg.dtype,
        "attention": backend,
        **device_facts(mesh, compiled),
        **flops_facts(config, objective),
    }
    if "flops_per_token" in facts:
        facts["step_flops"] = tokens * facts["flops_per_token"]
        if peak := peak_flops(mesh):
            facts["peak_flops"] = peak
    return run, facts


def device_facts(mesh: Any, compiled: Any) -> dict[str, Any]:
    """Return the devices, and the memory of a compiled program on one of them in MB."""
    kind = mesh.devices.flat[0].device_kind
    facts = {"devices": mesh.devices.size, "device_kind": kind}
    if memory := compiled.memory_analysis():
        facts["temporary_mb"] = memory.temp_size_in_bytes / 1e6
        facts["arguments_mb"] = memory.argument_size_in_bytes / 1e6
    if stats := mesh.local_devices[0].memory_stats():  # None on a CPU
        facts["device_peak_mb"] = stats["peak_bytes_in_use"] / 1e6
    return facts


def flops_facts(config: ConfigDict, objective: Any) -> dict[str, float]:
    """Return {"flops_per_token": ...}, or {} with a message if they are unknown."""
    from bertjax.assembly import train_step

    if objective.flops:
        shape = Shape(config.batch_size, config.data.length, (config.data.mask_rate,))
        specs = batch_specs(config, objective, shape)
        return {"flops_per_token": objective.flops(specs)}
    cli.say(train_step.NO_MFU.format(config.objective))
    return {}


def measure_packing(config: ConfigDict) -> Measured:
    """Time updates on real rows, padded and packed in turn; tokens are real ones."""
    if not config.data.train:
        raise UserError("--what=packing needs text: data.train is empty")
    runs, fills = [], []
    for config.data.packed in (False, True):
        stage = input_batches(config)
        batches = [stage.batch(step) for step in range(4)]
        run, facts = compile_step(config, batches, stage.specials.vocab_size)
        runs.append(run)
        tokens = sum(map(count_text, batches))
        fills.append(tokens / sum(map(count_slots, batches)))
    padded, packed = runs
    facts["tokens"] *= fills[1]
    facts |= {"fill": fills[1], "fill_padded": fills[0]}
    return Measured(facts, lambda n: {"padded": padded(n), "step": packed(n)})


def measure_plan(config: ConfigDict, sequences: int) -> Measured:
    """Time planning a corpus of made-up lengths, mapped from files, into a cache.

    Sentences have 25 tokens on average; documents have 60 with the plan "document" and
    1,500 otherwise. Their number yields about `sequences` rows or documents.
    """
    folder = tempfile.TemporaryDirectory()
    store = synthetic_store(Path(folder.name), config, sequences)
    before = memory_mb()
    facts: dict[str, Any] = {"tokens": len(store.tokens), "added_rss_mb": 0.0}

    def make_plan(step: int) -> None:
        with (
            tempfile.TemporaryDirectory(dir=folder.name) as cache,
            watch_memory() as most,
        ):
            form = run_batches.RowForm(config.data.length)
            how = config, form, {"train": store}
            plan = run_batches.make_plans(*how, cache=Path(cache))["train"]
            facts["sequences"], facts["rows"] = plan.sequences, plan.n
            del plan
        facts["added_rss_mb"] = max(facts["added_rss_mb"], most() - before)

    return Measured(facts, lambda steps: {"step": mean_seconds(make_plan, steps)})


def measure_input(config: ConfigDict) -> Measured:
    """Time the host's batch function, and its host half alone, in one thread."""
    stage, at = input_batches(config), itertools.count()
    gathered = [stage.gathered(step) for step in range(4)]

    def make(step: int) -> None:
        stage.features.make(gathered[step % len(gathered)])

    def run(steps: int) -> Seconds:
        seconds = mean_seconds(lambda step: stage.batch(next(at)), steps)
        return {"step": seconds, "masking": mean_seconds(make, steps)}

    run(1)
    return Measured(_facts(config, stage.specials.vocab_size), run)


def measure_loop(config: ConfigDict) -> Measured:
    """Run bertjax.train with `Pacer` as the last writer, which answers the requests.

    Every step is logged, none is evaluated or saved. Does not return.
    """
    from bertjax import train

    config.total = durations.duration(steps=MAX_STEPS)
    config.log.every = durations.duration(steps=1)
    config.checkpoint.every = durations.duration(steps=MAX_STEPS)
    config.log.writers += f",{Pacer.__module__}.{Pacer.__qualname__}"
    config.data.valid = ""
    Pacer.facts = _facts(config, expected_vocab_size(config))
    raise SystemExit(train.train(config, tempfile.mkdtemp()))


def measure_fill_mask(config: ConfigDict) -> Measured:
    """Time filling one blank of a text, from ids to probabilities."""
    import jax

    from bertjax.inference.fill_blanks import make_filler

    config.objective = "mlm"
    size = expected_vocab_size(config)
    objective, cfg = make_objective(config, size, jax.default_backend())
    params = jax.jit(objective.init)(jax.random.key(config.seed))
    pieces = [str(i) for i in range(cfg.vocab_size)]
    tokenizer = SimpleNamespace(
        vocab_size=cfg.vocab_size, pieces=pieces, pad_id=0, mask_id=1
    )
    fill = make_filler(cfg, params, tokenizer, 5)
    words = cfg.vocab_size - 2
    texts = {n: [1, *(2 + i % words for i in range(n - 1))] for n in (32, 128)}
    begun = time.perf_counter()
    for ids in texts.values():
        fill(ids)
    facts = _facts(config, cfg.vocab_size) | {"tokens": 128}
    facts["compile_seconds"] = time.perf_counter() - begun

    def run(steps: int) -> Seconds:
        seconds = {
            f"latency_{n}": mean_seconds(lambda step, ids=ids: fill(ids), steps)
            for n, ids in texts.items()
        }
        return seconds | {"step": seconds["latency_128"]}

    return Measured(facts, run)


def input_batches(config: ConfigDict) -> Any:
    """Build the batch function for the config's text, or for a made-up one."""
    if config.data.train:
        prepared_text.check_inputs(config)
        tokenizer, parts, *_ = prepared_text.prepare(config, cli.say)
    else:
        tokenizer, store = synthetic_text(
            expected_vocab_size(config), extra_ids=config.data.extra_ids
        )
        parts = {"train": store}
    return run_batches.make_phased_batches(config, tokenizer, parts).stages[0]


def _facts(config: ConfigDict, vocab_size: int) -> dict[str, Any]:
    """Return the facts about a config that need no compilation."""
    objective, _ = make_objective(config, config.model.vocab_size or vocab_size)
    return {
        "tokens": config.batch_size * config.data.length,
        "compile_seconds": 0.0,
        **flops_facts(config, objective),
    }


MEASURES = {
    "step": measure_step,
    "input": measure_input,
    "loop": measure_loop,
    "packing": measure_packing,
    "plan": measure_plan,
    "fill_mask": measure_fill_mask,
    "generate": measure_generate,
}
