# SPDX-License-Identifier: Apache-2.0
"""Format estimates of a config on a slice for people."""

from typing import Any

from bertjax import counted
from bertjax.measuring.memory_analysis import PROGRAM_BYTES

CODE = f", and {PROGRAM_BYTES / 2**30:g} kept free for the program's code"


def describe(results: dict[str, Any]) -> list[str]:
    """Format the result of estimate_config; the last line tells whether it fits."""
    versions = ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    axes = " ".join(f"{k}={v}" for k, v in results["mesh"].items())
    lines = [
        f"{results['topology']}: {counted(results['chips'], 'chip')}, "
        f"{counted(results['devices'], 'device')}, "
        f"{counted(results['hosts'], 'host')}; mesh {axes}; {versions}"
    ]
    several = len({phase["objective"] for phase in results["phases"]}) > 1
    for phase in results["phases"]:
        head = f"{counted(phase['batch_size'], 'row')} of {phase['length']} tokens"
        head += f" for {phase['objective']}" * several
        if results["accumulate"] > 1:
            head += f" in {results['accumulate']} micro-batches"
        values = phase_values(phase)
        at_once = counted(phase["rows_per_device"], "row")
        lines += ["", f"{head}, {at_once} a device at once"]
        lines += [f"  {name:26} {value}" for name, value in values]
    lines.append("")
    if results["data"] is None:
        lines.append("text: data.train is empty, so padding is not known")
    lines += [
        f"text: rows of {phase['length']} are {phase['fill']:.1%} full, padding is "
        f"{1 - phase['fill']:.1%}; {phase['predictions_per_row']:.1f} of "
        f"{counted(phase['slots_per_row'], 'position')} a row are predicted; "
        f"{counted(phase['rows_an_epoch'], 'row')} an epoch"
        for phase in results["data"] or ()
    ]
    if (hours := results["estimated_run_hours"]) is not None:
        lines.append(
            f"run: {counted(results['total_steps'], 'step is', 'steps are')} "
            f"{hours:.3g} hours, ESTIMATED, without collectives, evaluations and saves"
        )
    hosts, each = results["hosts"], results["batch_size"] / results["hosts"]
    return [
        *lines,
        f"hosts: each of {hosts} makes {each:,.10g} row{'s' * (each != 1)} per step "
        "and reads all of the token store",
        f"TensorFlow: {results['tensorflow']}",
        "",
        verdict(results),
    ]


def phase_values(phase: dict[str, Any]) -> list[tuple[str, str]]:
    """List the names and values for a phase."""
    need, parts = phase["hbm_gib"], phase["hbm_parts_gib"]
    used = "more than there is" if need is None else f"{need:.2f} GiB"
    used += f" of {phase['hbm_gib_available']:.2f} GiB"
    largest = phase["largest_batch_per_device"]
    rows = f"{counted(largest, 'row')} at once"
    rows += ", or more" * (not phase["largest_batch_is_limit"])
    values = [
        ("attention", phase["attention"]),
        ("memory per device", used + ("" if "program" in parts else CODE)),
        *((f"  {part}", f"{gib:.3f} GiB") for part, gib in parts.items()),
        ("largest batch per device", f"{rows}, by the compiler's early report"),
    ]
    if phase["eval_fits"] is not None:
        need = phase["eval_hbm_gib"]
        used = "does not fit" if need is None else f"{need:.2f} GiB{CODE}"
        values.append(("evaluation", used))
    for key, name, form in (
        ("step_ms", "step", "{:.2f} ms by cycles"),
        ("tokens_per_second_per_chip", "tokens/s per chip", "{:,.0f}"),
        ("mfu", "MFU", "{:.3f}"),
    ):
        if (value := phase[f"estimated_{key}"]) is not None:
            values.append((f"{name}, ESTIMATED", form.format(value)))
    if phase["kernels"]:
        share = f"{phase['kernels']} a step, {phase['estimated_kernel_ms']:.2f} ms"
        values.append(("custom kernels", f"{share} of it by formula, not by cycles"))
    for loop in phase["uncounted_loops"]:
        values.append(("WARNING", f"loop {loop} is counted once: the time is short"))
    for kind, n in phase["collectives"].items():
        sent = f"{n['count']} a step, {n['bytes'] / 2**20:,.1f} MiB (not in the time)"
        values.append((kind, sent))
    return values


def verdict(results: dict[str, Any]) -> str:
    """Report in one line whether the config fits, and otherwise what might."""
    batch = f"{counted(results['batch_size'], 'row')} of {results['length']} tokens"
    batch += f" on {results['topology']}"
    if results["fits"]:
        return f"fits: {batch}"
    need, most = results["hbm_gib"], results["hbm_gib_available"]
    whole = "program" in results["hbm_parts_gib"]
    if results["eval_fits"] and not whole and need is not None and need <= most:
        return (
            f"may not fit: {batch}, by how much the program's code takes; without "
            "--quick it is compiled to the end, and counted"
        )
    parts = results["accumulate_to_fit"]
    if parts and parts > results["accumulate"]:
        return f"does not fit: {batch}; --config.accumulate={parts} may"
    why = "not even one row per device"
    if results["eval_fits"] is False:
        why = "the evaluation is too large beside the optimizer's state"
    hints = "a larger slice, mesh.fsdp, model.remat=full or shorter rows"
    return f"does not fit: {batch}, {why}; try {hints}"
