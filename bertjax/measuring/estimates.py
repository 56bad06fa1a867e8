# SPDX-License-Identifier: Apache-2.0
"""From compiled programs to figures: memory, the largest batch, time. All estimates."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from bertjax.measuring import kernel_costs
from bertjax.measuring.compile_steps import Target
from bertjax.measuring.memory_analysis import (
    PROGRAM_BYTES,
    early_facts,
    memory_bytes,
)
from bertjax.measuring.synthetic_data import Shape
from bertjax.models.config import EncoderConfig, keys_seen
from bertjax.parallel.chips import Chip

Say = Callable[[str], None]
GIB = 2**30
PROBES = 8  # batches that the search for the largest one looks at, at most
MOST = 2**17  # tokens a device at once, beyond which nobody looks for more rows
NEAR = 0.03  # it ends this near to a full memory or to a batch that does not fit


def estimate(
    target: Target, shape: Shape, say: Say, quick: bool = False, search: bool = True
) -> dict[str, Any]:
    """Compile both steps of a shape and return what they need and take.

    The keys are those of `preflight --json`; estimated_* and eval_* are None where the
    update does not fit. quick: memory, and times only where they are known; search:
    for the largest batch, else largest_batch_per_device and accumulate_to_fit are None.
    """
    chip = target.chip
    rows = target.rows(shape)
    said = f"{shape.batch_size} x {shape.length} on {target.topology}, {rows} a device"
    out = {"batch_size": shape.batch_size, "length": shape.length}
    out |= {"predictions": shape.predictions, "rows_per_device": rows}
    out |= {"eval_fits": None, "eval_hbm_gib": None}
    state = target.state_parts()
    largest = 0 if search else None
    hopeless = sum(state) > chip.hbm_bytes
    if hopeless:
        say(f"{said}: the state alone does not fit, nothing is compiled")
        facts: dict[str, Any] = {"fits": False, "refused": True, "needed": sum(state)}
    else:
        say(f"the update's memory: {said}")
        facts = target.memory("train", shape)
    if not facts["refused"]:
        say("the evaluation's memory")
        out |= eval_memory(target.evaluation, state.optimizer, chip)
        known = target.is_compiled("train", shape)
        if not (known or quick):
            say("compiling the update for its cycles, which takes minutes")
        if known or not quick:
            facts = target.facts("train", shape)
    if search and not hopeless:
        largest = search_largest(target, shape, facts, say)
    needed = memory_bytes(facts)
    out["fits"] = facts["fits"] and out["eval_fits"]
    out["hbm_gib"] = None if needed is None else needed / GIB
    out["hbm_gib_available"] = chip.hbm_gib
    out["hbm_parts_gib"] = memory_parts(target, facts)
    out["largest_batch_per_device"] = largest
    out["accumulate_to_fit"] = (
        None if largest is None else accumulate_to_fit(target, shape, largest)
    )
    return out | time_estimate(target, shape, facts, chip)


def memory_parts(target: Target, facts: Mapping[str, Any]) -> dict[str, float]:
    """Part the memory of a device, GiB: state by the shardings, the rest as compiled.

    `batch` holds what tiling adds to the inputs too. Without a whole compilation what
    is not state is one part, and the program's code is not in it.
    """
    state = target.state_parts()
    parts = {"parameters": state.parameters, "optimizer": state.optimizer}
    if "temporaries" in facts:
        parts["batch"] = max(facts["arguments"] - sum(state), 0)
        for name in ("temporaries", "outputs", "program"):
            parts[name] = facts[name]
    elif facts["needed"] is not None:
        parts["activations"] = max(facts["needed"] - sum(state), 0)
    return {name: n / GIB for name, n in parts.items()}


def time_estimate(
    target: Target, shape: Shape, facts: Mapping[str, Any], chip: Chip
) -> dict[str, Any]:
    """Estimate a step: cycles over the clock, and kernels by the formula.

    The time of collectives is not in it: they are counted, and run beside the rest as
    far as the compiler can arrange it.
    """
    names = ("step_ms", "kernel_ms", "tokens_per_second_per_chip", "mfu")
    out: dict[str, Any] = {f"estimated_{name}": None for name in names}
    out |= {"collectives": facts.get("collectives", {})}
    out |= {"kernels": 0, "uncounted_loops": []}
    if "cycles" not in facts:
        return out
    by_formula = kernel_costs.seconds(
        facts["kernels"], chip, share_of_keys(target.cfg, shape.length)
    )
    seconds = facts["cycles"] / (1e9 * chip.ghz) + by_formula
    tokens = target.tokens(shape) / target.mesh.devices.size  # a device
    flops = target.objective.flops
    each = flops and flops(shape.length, shape.predictions)
    values = (
        1e3 * seconds,
        1e3 * by_formula,
        tokens * chip.devices / seconds,
        each and tokens * each / chip.flops / seconds,
    )
    out |= {f"estimated_{k}": v for k, v in zip(names, values, strict=True)}
    out["kernels"] = sum(k.times for k in facts["kernels"])
    # The first one goes through the updates of a call: a round of it is a step.
    calls = target.config.steps_per_call > 1
    out["uncounted_loops"] = facts["unknown_loops"][calls:]
    return out


def share_of_keys(cfg: EncoderConfig, length: int) -> float:
    """Return the part of all keys that a query looks at, in the mean over layers."""
    seen = keys_seen(cfg, length)
    return sum(seen) / len(seen) / length


def eval_memory(facts: Mapping[str, Any], optimizer: int, chip: Chip) -> dict[str, Any]:
    """Say what an evaluation takes beside the optimizer's state, which stays.

    Its program's code is not in the figure, but room for it is left.
    """
    if facts["needed"] is None:
        return {"eval_fits": facts["fits"], "eval_hbm_gib": None}
    total = facts["needed"] + optimizer
    fits = facts["fits"] and total + PROGRAM_BYTES <= chip.hbm_bytes
    return {"eval_fits": fits, "eval_hbm_gib": total / GIB}


def search_largest(
    target: Target, shape: Shape, facts: Mapping[str, Any], say: Say
) -> int:
    """Find the most rows of this shape that fit a device at once, by early reports.

    facts: of the shape itself. Room is left for the program's code, which is not in the
    reports: PROGRAM_BYTES, or what the shape's own takes if that is more.
    Memory is nearly a straight line in the rows, so each guess lies on the line through
    the batches around it. More rows than fill the memory may fit too, by the compiler's
    computing things twice: they are not looked for. 0: not even a row fits. Where MOST
    tokens fit the search ends.
    """
    most = max(target.rows(shape), MOST // shape.length)
    program = max(PROGRAM_BYTES, facts.get("program", 0))
    available = target.chip.hbm_bytes - program
    # 0 rows stand for the state alone; None: the compiler did not say how much.
    fitting: dict[int, int] = {0: sum(target.state_parts())}
    refused: dict[int, int | None] = {}

    def note(rows: int, found: Mapping[str, Any]) -> None:
        (fitting if found["fits"] else refused)[rows] = found["needed"]

    note(target.rows(shape), early_facts(facts))
    for _ in range(PROBES):
        below, above = max(fitting), min(refused, default=math.inf)
        if fitting[below] >= (1 - NEAR) * available:
            break
        if refused and above - below <= max(grain(below), NEAR * above):
            break
        if not refused and below >= most:
            break
        rows = guess(fitting, refused, available)
        rows = rows if refused else min(rows, most)
        say(f"the memory of {rows} rows a device, to find the largest batch")
        other = with_rows(target, shape, rows)
        note(rows, target.memory("train", other, program))
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
        return rounded(max(min(rows, 64 * n1), (1 + NEAR) * n1 + grain(n1)))
    n2, m2 = min(refused.items())
    part = 0.5 if m2 is None else (available - m1) / max(m2 - m1, 1)
    rows = rounded(n1 + (n2 - n1) * min(max(part, 0.2), 0.8))
    return min(max(rows, n1 + 1), n2 - 1)


def grain(rows: int) -> int:
    """Return the step between numbers of rows that are worth a look."""
    return 8 if rows >= 16 else 1


def with_rows(target: Target, shape: Shape, rows: int) -> Shape:
    """Return the shape with this many rows a device at once."""
    return shape._replace(batch_size=rows * target.parts * target.config.accumulate)


def rounded(rows: float) -> int:
    """Round down to a whole number of grains."""
    n = max(int(rows), 0)
    return n - n % grain(n)


def accumulate_to_fit(target: Target, shape: Shape, largest: int) -> int | None:
    """Return the fewest micro-batches with which a batch may fit; None: no number.

    Not compiled: where there is one micro-batch now, several add the sums of gradients.
    """
    if target.objective.whole_batch is not None:  # whose rows are not to be parted
        return None
    rows = shape.batch_size // target.parts
    fitting = (a for a in range(1, rows + 1) if rows % a == 0 and rows // a <= largest)
    return next(fitting, None)
