# SPDX-License-Identifier: Apache-2.0
"""What a config needs and takes on a slice, by its compiled programs. All estimates."""

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
SEARCH_STEPS = 8  # batches that the search for the largest one compiles, at most
MOST_TOKENS = 2**17  # a device at once, beyond which nobody looks for more rows
NEAR = 0.03  # it ends this near to a full memory or to a batch that does not fit
# Matrix products of a splash attention kernel: scores, then context; backward the
# scores again, and the gradients of weights, q, k and v. Where the gradient of q has a
# kernel of its own, both make scores and the weights' gradient.
PRODUCTS = {"fwd": 2, "dkv": 5, "dkv beside dq": 4, "dq": 3}
# Of each phase so many batches are read, and of each at most so many rows.
SAMPLE_BATCHES, SAMPLE_ROWS = 4, 256


def estimate_config(
    config: ConfigDict,
    topology: str,
    say: Say,
    quick: bool = False,
    search: bool = True,
) -> dict[str, Any]:
    """Return what `preflight --json` prints: the phase that needs most memory, and all.

    quick, search: see estimate.
    Raises UserError when the config and the topology do not go together.
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
    """Return how many updates `total` comes to, and their hours by the estimated step.

    Each is None where it is not known: of a run with several phases, of epochs without
    text, of a budget of time, of a step without an estimate.
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
    """Return the vocabulary's size, and for each phase how full rows of data.train are.

    Without data.train the size is the config's own, and None takes the phases' place.
    """
    if not config.data.train:
        return expected_vocab_size(config), None
    tokenizer, parts, *_ = prepared_text.prepare(config, say)
    phases = []
    for stage in run_batches.make_course(config, tokenizer, parts).stages:
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
    """Say whether TensorFlow, which stays unimported, might take the accelerator."""
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
    """Compile both steps of a shape and return what they need and take.

    The keys are those of `preflight --json`; estimated_* and eval_* are None where the
    update does not fit. quick: memory, and times only where they are known; search:
    for the largest batch, else largest_batch_per_device and accumulate_to_fit are None.
    """
    chip, rows = target.chip, target.rows(shape)
    what = f"{shape.batch_size} x {shape.length} on {target.topology}, {rows} a device"
    parts = target.state_parts()
    state = sum(parts.values())
    eval_fits = eval_gib = None
    if state > chip.hbm_bytes:
        say(f"{what}: the state alone does not fit, nothing is compiled")
        facts: dict[str, Any] = {"fits": False, "refused": True, "needed": state}
        largest = 0
    else:
        say(f"the update's memory: {what}")
        facts = target.memory("train", shape)
        if not facts["refused"]:
            say("the evaluation's memory")
            evaluation = target.evaluation(shape.objective)
            eval_fits = evaluation["fits"]
            if evaluation["needed"] is not None:
                # Beside it the optimizer's state; room is left for the program's code.
                used = evaluation["needed"] + parts["optimizer"]
                eval_fits = eval_fits and used + PROGRAM_BYTES <= chip.hbm_bytes
                eval_gib = used / GIB
            known = target.is_compiled("train", shape)
            if not (known or quick):
                say("compiling the update for its cycles, which takes minutes")
            if known or not quick:
                facts = target.facts("train", shape)
        largest = search_largest(target, shape, facts, say) if search else 0
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
        "accumulate_to_fit": (
            accumulate_to_fit(target, shape, largest) if search else None
        ),
        **time_estimate(target, shape, facts, chip),
    }


def memory_parts(target: Target, facts: Mapping[str, Any]) -> dict[str, float]:
    """Part the memory of a device, GiB: state by the shardings, the rest as compiled.

    `batch` holds what tiling adds to the inputs too. Without a whole compilation what
    is not state is one part, and the program's code is not in it.
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
    """Estimate a step: cycles over the clock, and kernels by the formula.

    The time of collectives is not in it: they are counted, and run beside the rest as
    far as the compiler can arrange it.
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
    tokens = target.tokens(shape) / target.mesh.devices.size  # a device
    if count_flops := target.objectives[shape.objective].flops:
        flops = tokens * count_flops(target.specs(shape))
        out["estimated_mfu"] = flops / chip.flops / seconds
    # The first one goes through the updates of a call: a round of it is a step.
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

    What a kernel says of itself counts; splash attention does not, and is counted by
    its shapes: `share` is the part of the keys that a query looks at, in the mean over
    the layers. Of any other kernel only the bytes are known.
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
    """Count 2 operations an element of each product of attention [..., H, L, K].

    With all keys a forward pass is 4 L^2 K H a row, a backward pass 10 L^2 K H.
    """
    which = next((p for p in ("fwd", "dkv", "dq") if f"_{p}" in kernel.name), "fwd")
    if which == "dkv" and own_dq:
        which = "dkv beside dq"
    queries = next((s for s in kernel.shapes if len(s) >= 4), (0, 0))
    return 2.0 * PRODUCTS[which] * math.prod(queries) * share * queries[-2]


def share_of_keys(cfg: EncoderConfig, length: int) -> float:
    """Return the part of all keys that a query looks at, in the mean over layers."""
    seen = keys_seen(cfg, length)
    return sum(seen) / len(seen) / length


def search_largest(
    target: Target, shape: Shape, facts: Mapping[str, Any], say: Say
) -> int:
    """Find the most rows of this shape that fit a device at once, by early reports.

    facts: of the shape itself. Room is left for the program's code, which is not in the
    reports: PROGRAM_BYTES, or what the shape's own takes if that is more.
    Memory is nearly a straight line in the rows, so each guess lies on the line through
    the batches around it. More rows may fit too, by the compiler's computing things
    twice. 0: not even a row fits. Where MOST_TOKENS fit the search ends.
    """
    most = max(target.rows(shape), MOST_TOKENS // shape.length)
    program = max(PROGRAM_BYTES, facts.get("program", 0))
    available = target.chip.hbm_bytes - program
    # 0 rows stand for the state alone; None: the compiler did not say how much.
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
        if rows in fitting or rows in refused:  # no whole group is between the two
            break
        say(f"the memory of {counted(rows, 'row')} a device, to find the largest batch")
        batch_size = rows * target.parts * target.config.accumulate
        larger = shape._replace(batch_size=batch_size)
        note(rows, target.memory("train", larger, program))
    return max(fitting)


def guess(
    fitting: Mapping[int, int], refused: Mapping[int, int | None], available: int
) -> int:
    """Guess the most rows that fit, from bytes by rows of what does and does not."""
    n1, m1 = max(fitting.items())
    if not refused:
        # As if there were nothing but the state and what grows with the rows: not far
        # enough rather than too far, and a little further each time.
        rows = n1 * (available - fitting[0]) / max(m1 - fitting[0], 1)
        return round_down(max(min(rows, 64 * n1), (1 + NEAR) * n1 + grain(n1)))
    n2, m2 = min(refused.items())
    part = 0.5 if m2 is None else (available - m1) / max(m2 - m1, 1)
    rows = round_down(n1 + (n2 - n1) * min(max(part, 0.2), 0.8))
    return min(max(rows, n1 + 1), n2 - 1)


def grain(rows: int) -> int:
    """Return the step between numbers of rows that are worth a look."""
    return 8 if rows >= 16 else 1


def round_down(rows: float) -> int:
    """Round down to a whole number of grains."""
    return int(rows) - int(rows) % grain(int(rows))


def accumulate_to_fit(target: Target, shape: Shape, largest: int) -> int | None:
    """Return the fewest micro-batches with which a batch may fit; None: no number.

    Not compiled: where there is one micro-batch now, several add the sums of gradients.
    """
    objective = target.objectives[shape.objective]
    if objective.whole_batch is not None:  # whose rows are not to be parted
        return None
    rows, group = shape.batch_size // target.parts, objective.group
    parts = (a for a in range(1, rows + 1) if rows % (a * group) == 0)
    return next((a for a in parts if rows // a <= largest), None)
