# SPDX-License-Identifier: Apache-2.0
"""Estimate a config's memory and time on a slice from its compiled programs."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from importlib import metadata
from types import SimpleNamespace
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import counted
from bertjax.assembly import batches as run_batches
from bertjax.assembly import prepared_text, train_step
from bertjax.config import durations
from bertjax.data.features import base as features
from bertjax.data.phases import steps_of
from bertjax.measuring import topologies
from bertjax.measuring.compile_steps import Target, versions
from bertjax.measuring.hlo import Kernel
from bertjax.measuring.memory_analysis import PROGRAM_BYTES, early_facts, memory_bytes
from bertjax.measuring.synthetic_data import Shape, expected_vocab_size, with_row_sizes
from bertjax.models.config import EncoderConfig
from bertjax.models.flops import keys_seen
from bertjax.parallel.chips import Chip
from bertjax.tasks.tables import Say

GIB = 2**30
SEARCH_STEPS = 8  # the most batches that the search for the largest one compiles
MOST_TOKENS = 2**17  # per device; beyond this the search for more rows ends
# the search also ends this close to full memory or to a batch that does not fit
NEAR = 0.03
# Matrix products of a splash attention kernel. Forward: scores, then context; backward:
# scores again, and the gradients of weights, q, k and v. If the gradient of q has its
# own kernel, both backward kernels compute scores and the gradient of weights.
PRODUCTS = {"fwd": 2, "dkv": 5, "dkv beside dq": 4, "dq": 3}
# So many batches of each phase are read, with at most so many rows each.
SAMPLE_BATCHES, SAMPLE_ROWS = 4, 256


def estimate_config(
    config: ConfigDict,
    topology: str,
    say: Say,
    quick: bool = False,
    search: bool = True,
) -> dict[str, Any]:
    """Return what `preflight --json` prints.

    It has all phases, and the values of the phase that needs the most memory.
    quick, search: see estimate. Raises UserError if config and
    topology do not go together.
    """
    if config.data.train:
        prepared_text.check_inputs(config)
    devices = topologies.find_devices(topology)
    vocab_size, text = sample_text(config, say)
    config = with_row_sizes(config, text)
    target = Target(config, vocab_size, topology, devices)
    for name, objective in target.objectives.items():
        if not objective.flops:
            say(train_step.NO_MFU.format(name or config.objective))
    phases = [
        {"objective": shape.objective or config.objective}
        | {"attention": target.attention(shape)}
        | estimate(target, shape, say, quick, search)
        for shape in target.shapes()
    ]
    largest = max(phases, key=lambda phase: (not phase["fits"], phase["hbm_gib"] or 0))
    return {
        "topology": topology,
        "devices": len(devices),
        "chips": len(devices) // target.chip.devices,
        "hosts": target.hosts,
        "mesh": dict(target.mesh.shape),
        "accumulate": config.accumulate,
        **largest,
        "phases": phases,
        **run_estimate(config, phases, text),
        "data": text,
        "tensorflow": describe_tensorflow(config),
        "versions": versions(),
    }


def run_estimate(
    config: ConfigDict,
    phases: Sequence[Mapping[str, Any]],
    text: Sequence[Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """Return the number of updates in `total`, and their hours by the estimate.

    Each is None if it is unknown: for a run with several phases, for epochs without
    text, for a time budget, and for a step without an estimate.
    """
    out: dict[str, Any] = {"total_steps": None, "estimated_run_hours": None}
    unit, number = durations.unit_of(config, "total")
    is_unread = unit == "epochs" and text is None
    if len(phases) > 1 or config.budget_minutes or is_unread:
        return out
    (phase,) = phases
    epoch = text[0]["rows_an_epoch"] if text else 1
    first = SimpleNamespace(**{k: phase[k] for k in ("batch_size", "length")}, n=epoch)
    total = steps_of(unit, number, first, 0)
    out["total_steps"] = total
    if (step_ms := phase["estimated_step_ms"]) is not None:
        out["estimated_run_hours"] = total * step_ms / 3.6e6
    return out


def sample_text(
    config: ConfigDict, say: Say
) -> tuple[int, list[dict[str, Any]] | None]:
    """Return the vocabulary's size, and how full rows of data.train are by phase.

    Without data.train the size is the config's own, and the list is None.
    """
    if not config.data.train:
        return expected_vocab_size(config), None
    tokenizer, parts, *_ = prepared_text.prepare(config, say)
    phases = []
    for stage in run_batches.make_phased_batches(config, tokenizer, parts).stages:
        batches = [
            stage.batch(stage.start + i, slice(0, SAMPLE_ROWS))
            for i in range(SAMPLE_BATCHES)
        ]
        rows = sum(len(b["input_ids"]) for b in batches)
        filled = sum(map(features.count_slots, batches))
        tokens = sum(map(features.count_text, batches))
        names = features.prediction_weights(stage.specs)
        weights = [b[name] for b in batches for name in names]
        predicted = sum(int((values > 0).sum()) for values in weights)
        phases.append(
            {
                "start": stage.start,
                "length": stage.length,
                "batch_size": stage.batch_size,
                "rows_an_epoch": stage.n,
                "sequences_per_row": math.prod(stage.specs["input_ids"].shape[:-1]),
                "fill": tokens / filled,
                "slots_per_row": stage.P,
                "predictions_per_row": predicted / rows,
            }
        )
    return tokenizer.vocab_size, phases


def describe_tensorflow(config: ConfigDict) -> str:
    """Tell whether TensorFlow might take the accelerator, without importing it."""
    if importlib.util.find_spec("tensorflow") is None:
        return "not installed"
    engine = "" if config.data.engine == "tf" else ", and data.engine does not load it"
    verdicts = {
        "tensorflow-cpu": "{} knows no accelerator",
        "tensorflow-tpu": "WARNING: {} takes the TPU: install tensorflow-cpu" + engine,
        "tensorflow": "{}: GPUs are hidden from it" + engine,
    }
    for name, verdict in verdicts.items():
        try:
            return verdict.format(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return f"a build of its own: WARNING, it may take the accelerator{engine}"


def estimate(
    target: Target, shape: Shape, say: Say, quick: bool = False, search: bool = True
) -> dict[str, Any]:
    """Compile both steps of a shape and return the memory and time that they need.

    The keys are those of `preflight --json`; estimated_* and eval_* are None if the
    update does not fit. quick: memory, and times only if they are known; search:
    find the largest batch; without it largest_batch_per_device,
    largest_batch_is_limit and accumulate_to_fit are None.
    """
    chip, rows = target.chip, target.rows(shape)
    what = f"{shape.batch_size} x {shape.length} on {target.topology}, {rows} a device"
    parts = target.state_parts()
    state = sum(parts.values())
    eval_fits = eval_gib = None
    largest, is_limit = 0, True
    if state > chip.hbm_bytes:
        say(f"{what}: the state alone does not fit, so nothing is compiled")
        facts: dict[str, Any] = {"fits": False, "refused": True, "needed": state}
    else:
        say(f"the update's memory: {what}")
        facts = target.memory("train", shape)
        if not facts["refused"]:
            say("the evaluation's memory")
            evaluation = target.evaluation(shape.objective)
            eval_fits = evaluation["fits"]
            if evaluation["needed"] is not None:
                # Add the optimizer's state, and reserve memory for the program's code.
                used = evaluation["needed"] + parts["optimizer"]
                eval_fits = eval_fits and used + PROGRAM_BYTES <= chip.hbm_bytes
                eval_gib = used / GIB
            known = target.is_compiled("train", shape)
            if not (known or quick):
                say("compiling the update for its cycles, which takes minutes")
            if known or not quick:
                facts = target.facts("train", shape)
        if search:
            largest, is_limit = search_largest(target, shape, facts, say)
    needed = memory_bytes(facts)
    return {
        "batch_size": shape.batch_size,
        "length": shape.length,
        "predictions": features.predictions(target.specs(shape)),
        "rows_per_device": rows,
        "eval_fits": eval_fits,
        "eval_hbm_gib": eval_gib,
        "fits": facts["fits"] and eval_fits,
        "hbm_gib": None if needed is None else needed / GIB,
        "hbm_gib_available": chip.hbm_gib,
        "hbm_parts_gib": memory_parts(target, facts),
        "largest_batch_per_device": largest if search else None,
        "largest_batch_is_limit": is_limit if search else None,
        "accumulate_to_fit": (
            accumulate_to_fit(target, shape, largest) if search else None
        ),
        **time_estimate(target, shape, facts, chip),
    }


def memory_parts(target: Target, facts: Mapping[str, Any]) -> dict[str, float]:
    """Split a device's memory in GiB: the state by shardings, the rest as compiled.

    `batch` includes padding of the inputs by tiling. Without a full compilation
    everything but the state is one part, without the program's code.
    """
    parts = target.state_parts()
    state = sum(parts.values())
    if "temporaries" in facts:
        parts["batch"] = max(facts["arguments"] - state, 0)
        for name in ("temporaries", "outputs", "program"):
            parts[name] = facts[name]
    elif facts["needed"] is not None:
        parts["activations"] = max(facts["needed"] - state, 0)
    return {name: n / GIB for name, n in parts.items()}


def time_estimate(
    target: Target, shape: Shape, facts: Mapping[str, Any], chip: Chip
) -> dict[str, Any]:
    """Estimate the time of a step: cycles over the clock, and kernels by a formula.

    The time of collectives is not included: they are counted, and overlap with the rest
    as far as the compiler can arrange it.
    """
    unknown = "step_ms", "kernel_ms", "tokens_per_second_per_chip", "mfu"
    out: dict[str, Any] = {f"estimated_{key}": None for key in unknown}
    sent = facts.get("collectives", {})
    out |= {"collectives": sent, "kernels": 0, "uncounted_loops": []}
    if "cycles" not in facts:
        return out
    share = share_of_keys(target.cfgs[shape.objective], shape.length)
    of_kernels = kernel_seconds(facts["kernels"], chip, share)
    seconds = facts["cycles"] / (1e9 * chip.ghz) + of_kernels
    tokens = target.tokens(shape) / target.mesh.devices.size  # per device
    if count_flops := target.objectives[shape.objective].flops:
        flops = tokens * count_flops(target.specs(shape))
        out["estimated_mfu"] = flops / chip.flops / seconds
    # The first loop runs the updates of a call, so one iteration is a step.
    calls = target.config.steps_per_call > 1
    return out | {
        "estimated_step_ms": 1e3 * seconds,
        "estimated_kernel_ms": 1e3 * of_kernels,
        "estimated_tokens_per_second_per_chip": tokens * chip.devices / seconds,
        "kernels": sum(k.times for k in facts["kernels"]),
        "uncounted_loops": facts["unknown_loops"][calls:],
    }


def kernel_seconds(kernels: Sequence[Kernel], chip: Chip, share: float = 1.0) -> float:
    """Estimate the time of a step's kernels on a device.

    A kernel's own cost estimate is used if it has one. Splash attention has none, and
    is counted by its shapes: `share` is the fraction of keys that a query attends to,
    averaged over the layers. For other kernels only the bytes are known.
    """
    own_dq = any("splash" in k.name and "_dq" in k.name for k in kernels)
    total = 0.0
    for kernel in kernels:
        flops, moved = kernel.flops, kernel.moved or kernel.touched
        if flops is None and "splash" in kernel.name:
            flops = _splash_flops(kernel, share, own_dq)
        total += kernel.times * chip.kernel_seconds(flops or 0.0, moved)
    return total


def _splash_flops(kernel: Kernel, share: float, own_dq: bool) -> float:
    """Count 2 operations per element of each product of attention [..., H, L, K].

    With all keys a forward pass is 4 L^2 K H per row, and a backward pass 10 L^2 K H.
    """
    which = next((p for p in ("fwd", "dkv", "dq") if f"_{p}" in kernel.name), "fwd")
    if which == "dkv" and own_dq:
        which = "dkv beside dq"
    queries = next((s for s in kernel.shapes if len(s) >= 4), (0, 0))
    return 2.0 * PRODUCTS[which] * math.prod(queries) * share * queries[-2]


def share_of_keys(cfg: EncoderConfig, length: int) -> float:
    """Return the fraction of keys that a query attends to, averaged over the layers."""
    seen = keys_seen(cfg, length)
    return sum(seen) / len(seen) / length


def search_largest(
    target: Target, shape: Shape, facts: Mapping[str, Any], say: Say
) -> tuple[int, bool]:
    """Find the most rows of this shape that fit on a device at once, by early reports.

    Also returns whether they are the limit: whether they fill the memory, or a larger
    batch did not fit.

    facts: of the shape itself. Memory is reserved for the program's code, which the
    reports omit: PROGRAM_BYTES, or the size of the shape's own code if that is larger.
    Memory is almost linear in the rows, so each guess is on the line through the
    batches around it. More rows may fit if the compiler recomputes values. Returns 0 if
    not even one row fits. The search ends when MOST_TOKENS fit.
    """
    most = max(target.rows(shape), MOST_TOKENS // shape.length)
    program = max(PROGRAM_BYTES, facts.get("program", 0))
    available = target.chip.hbm_bytes - program
    # 0 rows stand for the state alone; None: the compiler did not report the amount.
    fitting: dict[int, int] = {0: sum(target.state_parts().values())}
    refused: dict[int, int | None] = {}

    def note(rows: int, facts: Mapping[str, Any]) -> None:
        (fitting if facts["fits"] else refused)[rows] = facts["needed"]

    note(target.rows(shape), early_facts(facts))
    for _ in range(SEARCH_STEPS):
        below, above = max(fitting), min(refused, default=math.inf)
        near = refused and above - below <= max(grain(below), NEAR * above)
        if fitting[below] >= (1 - NEAR) * available or near:
            break
        if not refused and below >= most:
            break
        rows = guess(fitting, refused, available)
        rows = rows if refused else min(rows, most)
        rows -= rows % target.objectives[shape.objective].group
        if rows in fitting or rows in refused:  # no whole group lies between the two
            break
        say(f"the memory of {counted(rows, 'row')} a device, to find the largest batch")
        batch_size = rows * target.parts * target.config.accumulate
        larger = shape._replace(batch_size=batch_size)
        note(rows, target.memory("train", larger, program))
    largest = max(fitting)
    return largest, bool(refused) or fitting[largest] >= (1 - NEAR) * available


def guess(
    fitting: Mapping[int, int], refused: Mapping[int, int | None], available: int
) -> int:
    """Guess the most rows that fit, from the bytes of numbers of rows tried so far."""
    n1, m1 = max(fitting.items())
    if not refused:
        # Assume only the state and memory that grows with the rows. This guesses
        # too few rows rather than too many. Near full memory the compiler may
        # recompute values, so that memory hardly grows: the least growth doubles
        # with each batch that fits.
        growth = 1 + NEAR * 2 ** (len(fitting) - 2)
        rows = n1 * (available - fitting[0]) / max(m1 - fitting[0], 1)
        return round_down(max(min(rows, 64 * n1), growth * n1 + grain(n1)))
    n2, m2 = min(refused.items())
    part = 0.5 if m2 is None else (available - m1) / max(m2 - m1, 1)
    rows = round_down(n1 + (n2 - n1) * min(max(part, 0.2), 0.8))
    return min(max(rows, n1 + 1), n2 - 1)


def grain(rows: int) -> int:
    """Return the distance between numbers of rows that are worth trying."""
    return 8 if rows >= 16 else 1


def round_down(rows: float) -> int:
    """Round down to a multiple of the grain."""
    return int(rows) - int(rows) % grain(int(rows))


def accumulate_to_fit(target: Target, shape: Shape, largest: int) -> int | None:
    """Return the fewest micro-batches with which a batch may fit; None if none do.

    This is not compiled, and if there is one micro-batch now, several would also need
    memory for the sums of gradients.
    """
    objective = target.objectives[shape.objective]
    if objective.whole_batch is not None:  # its rows must not be split
        return None
    rows, group = shape.batch_size // target.parts, objective.group
    parts = (a for a in range(1, rows + 1) if rows % (a * group) == 0)
    return next((a for a in parts if rows // a <= largest), None)
