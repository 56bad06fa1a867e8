# SPDX-License-Identifier: Apache-2.0
"""From compiled programs to figures: memory, the largest batch, time. All estimates."""

from collections.abc import Callable, Mapping
from typing import Any

from bertjax import UserError
from bertjax.measuring import kernels
from bertjax.measuring.compiled import Shape, Target, memory_bytes
from bertjax.models.config import EncoderConfig, flops_per_token
from bertjax.parallel.chips import CHIPS, Chip

Say = Callable[[str], None]
GIB = 2**30
VERIFICATIONS = 4  # compilations that --verify may cost
MARGIN = 0.95  # what is refused was squeezed before; what fits need not be


def chip_of(target: Target) -> Chip:
    """Return the chip of a target's devices."""
    kind = target.mesh.devices.flat[0].device_kind
    if kind not in CHIPS or not CHIPS[kind].ghz:
        raise UserError(f"--topology={target.topology}: nothing is known of {kind}")
    return CHIPS[kind]


def estimate(
    target: Target, shape: Shape, say: Say, verify: bool = False
) -> dict[str, Any]:
    """Compile both steps of a shape and return what they need and take.

    The keys are those of `preflight --json`; estimated_* and eval_* are None where the
    update does not fit. verify: compile the largest batch too.
    """
    chip = chip_of(target)
    rows = target.rows(shape)
    said = f"{shape.batch_size} x {shape.length} on {target.topology}, {rows} a device"
    out = {"batch_size": shape.batch_size, "length": shape.length}
    out |= {"predictions": shape.predictions, "rows_per_device": rows}
    state = target.state_parts()
    if sum(state) > chip.hbm_bytes:
        say(f"{said}: the state alone does not fit, nothing is compiled")
        facts: dict[str, Any] = {"fits": False, "needed": sum(state)}
        out |= {"largest_batch_per_device": 0, "largest_batch_verified": True}
    else:
        say(f"compiling the update: {said}")
        facts = target.train_step(shape)
        largest, verified = search_largest(target, shape, facts, say, verify)
        out["largest_batch_per_device"] = largest
        out["largest_batch_verified"] = verified
    needed = memory_bytes(facts)
    out["fits"] = facts["fits"]
    out["hbm_gib"] = None if needed is None else needed / GIB
    out["hbm_gib_available"] = chip.hbm_gib
    out["hbm_parts_gib"] = memory_parts(target, facts)
    out["accumulate_to_fit"] = accumulate_to_fit(
        target, shape, out["largest_batch_per_device"]
    )
    out |= time_estimate(target, shape, facts, chip)
    if facts["fits"]:
        say("compiling the evaluation")
        scored = target.eval_step(shape)
        out |= eval_estimate(scored, state.optimizer, chip)
        out["fits"] = out["eval_fits"]
    return out


def memory_parts(target: Target, facts: Mapping[str, Any]) -> dict[str, float]:
    """Part the memory of a device, GiB: state by the shardings, the rest as compiled.

    `batch` holds what tiling adds to the inputs too.
    """
    state = target.state_parts()
    parts = {"parameters": state.parameters, "optimizer": state.optimizer}
    if facts["fits"]:
        parts["batch"] = max(facts["arguments"] - sum(state), 0)
        for name in ("temporaries", "outputs", "program"):
            parts[name] = facts[name]
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
    out |= {"collectives": {}, "kernels": 0, "uncounted_loops": []}
    if not facts["fits"]:
        return out
    by_formula = kernels.seconds(
        facts["kernels"], chip, share_of_keys(target.cfg, shape.length)
    )
    seconds = facts["cycles"] / (1e9 * chip.ghz) + by_formula
    tokens = shape.batch_size * shape.length / target.mesh.devices.size  # a device
    each = flops_per_token(target.cfg, shape.length, shape.predictions)
    values = (
        1e3 * seconds,
        1e3 * by_formula,
        tokens * chip.devices / seconds,
        tokens * each / chip.flops / seconds,
    )
    out |= {f"estimated_{k}": v for k, v in zip(names, values, strict=True)}
    out["collectives"] = facts["collectives"]
    out["kernels"] = sum(k.times for k in facts["kernels"])
    out["uncounted_loops"] = facts["unknown_loops"]
    return out


def share_of_keys(cfg: EncoderConfig, length: int) -> float:
    """Return the part of all keys that a query looks at, in the mean over layers."""
    window = min(length, 2 * (cfg.local_attention // 2) + 1)
    seen = [length if every else window for every in cfg.is_global]
    return sum(seen) / len(seen) / length


def eval_estimate(
    facts: Mapping[str, Any], optimizer: int, chip: Chip
) -> dict[str, Any]:
    """Say what an evaluation takes beside the optimizer's state, which stays."""
    needed = memory_bytes(facts)
    total = None if needed is None else needed + optimizer
    fits = facts["fits"] and total is not None and total <= chip.hbm_bytes
    out = {"eval_fits": fits, "eval_hbm_gib": total and total / GIB}
    if facts["fits"]:
        seconds = facts["cycles"] / (1e9 * chip.ghz)
        out["eval_step_ms"] = 1e3 * (seconds + kernels.seconds(facts["kernels"], chip))
    return out


def search_largest(
    target: Target,
    shape: Shape,
    facts: Mapping[str, Any],
    say: Say,
    verify: bool = False,
) -> tuple[int, bool]:
    """Find the most rows of this shape that a device can hold at once.

    Memory is nearly a straight line in the rows. What is far from fitting is refused in
    seconds, with the memory it would need, and what fits takes minutes to compile: so
    the line goes through the batch at hand and one that is refused. Returns (rows,
    whether that number itself was compiled); 0 rows: not even one.
    """
    available = chip_of(target).hbm_bytes
    rows = target.rows(shape)
    known = {0: sum(target.state_parts()), rows: memory_bytes(facts)}
    fitting = {rows} if facts["fits"] else set()
    refused = set() if facts["fits"] else {rows}

    def probe(n: int) -> None:
        say(f"compiling with {n} rows a device, to find the largest batch")
        found = target.train_step(with_rows(target, shape, n))
        known[n] = memory_bytes(found)
        (fitting if found["fits"] else refused).add(n)

    def guess() -> int:
        """Follow the line through the two points next to the limit."""
        points = [(n, m) for n, m in sorted(known.items()) if m is not None]
        n0, m0 = [p for p in points if p[0] not in refused][-1]
        over = [p for p in points if p[0] in refused]
        if not over or over[0][1] <= m0:
            return n0
        slope = (over[0][1] - m0) / (over[0][0] - n0)
        n = min(n0 + MARGIN * max(available - m0, 0) / slope, min(refused) - 1)
        return max(rounded(n), n0)

    while not refused:
        probe(max(2 * max(fitting), int(available / least_a_row(target, shape)) + 1))
    found = guess()
    for _ in range(VERIFICATIONS if verify else 0):
        if found in fitting or not found:
            break
        probe(found)
        found = guess()
    return found, found in fitting


def least_a_row(target: Target, shape: Shape) -> int:
    """Return bytes that a row takes at least: each layer's input, in bf16."""
    cfg = target.cfg
    return 2 * shape.length * cfg.hidden_size * cfg.num_hidden_layers


def with_rows(target: Target, shape: Shape, rows: int) -> Shape:
    """Return the shape with this many rows a device at once."""
    return shape._replace(batch_size=rows * target.parts * target.config.accumulate)


def rounded(rows: float) -> int:
    """Round down to a whole number, from 16 on to a multiple of 8."""
    n = int(rows)
    return n - n % 8 if n >= 16 else max(n, 0)


def accumulate_to_fit(target: Target, shape: Shape, largest: int) -> int | None:
    """Return the fewest micro-batches with which a batch fits; None: no number does."""
    rows = shape.batch_size // target.parts
    fitting = (a for a in range(1, rows + 1) if rows % a == 0 and rows // a <= largest)
    return next(fitting, None)
