# SPDX-License-Identifier: Apache-2.0
"""See what a config costs on a TPU before paying: python -m bertjax.preflight

  --config=bert.py:base   a config, as for bertjax.train
  --topology=v5e:2x4      the slice: v4:2x2x1, v5p:2x2x2, v6e:8x8, tpu7x:2x2x1; two
                          slices are 2xv5e:4x4
  --quick                 memory and the largest batch, times only of what was compiled
                          before: it ends before the compiler writes machine code
  --json                  one JSON object
  --table=FILE            the shipped configs on several slices as a Markdown table:
                          memory on all of them, times on one

The TPU compiler (pip install libtpu; no TPU) compiles the update and the evaluation
that bertjax.train would run there. Memory is what that compiler needs, of programs
that it did not compile to the end without their code, for which 0.5 GiB are kept free;
times are its estimates, custom kernels by a formula (bertjax/parallel/chips.py),
collectives only counted. With data.train, padding and predictions come from the text.
Exit status 2 where the config does not fit.
"""

import importlib.util
import json
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from absl import flags
from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.assembly import batches as run_batches
from bertjax.assembly import command_line, prepared_text, resolve, train_step, validate
from bertjax.config import cli
from bertjax.config import flags as config_flags
from bertjax.measuring import topologies
from bertjax.measuring.synthetic_data import with_choices
from bertjax.training.signals import StopCommand, Stopped

LOOK = 4  # batches of a phase that are looked at, and of each at most
ROWS = 256  # rows


def define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "topology", None, "the slice, such as v5e:2x4; see above", flag_values=values
    )
    flags.DEFINE_string(
        "table",
        None,
        "write the shipped configs on several slices to this file",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "quick",
        False,
        "end before the compiler writes machine code",
        flag_values=values,
    )
    flags.DEFINE_boolean("json", False, "", flag_values=values)


def main(argv: Sequence[str]) -> int:
    StopCommand().install()  # the compiler's own handler would print its stack
    table = any(a.split("=")[0].lstrip("-") == "table" for a in argv)
    try:
        return (write_table if table else show)(argv)
    except Stopped as e:
        return e.status


def show(argv: Sequence[str]) -> int:
    """Print what one config needs on one topology."""
    args = command_line.parse(argv, define_flags)
    validate.check(args.config)
    topology = args.topology or topologies.DEFAULT
    topologies.parse(topology)
    topologies.prepare()
    if not args.topology:
        cli.say(f"no --topology: {topology}, eight chips of the smallest kind")
    results = preflight(args.config, topology, cli.say, args.quick)
    if args.json:
        print(json.dumps(results))
    else:
        print("\n".join(describe(results)))
    return 0 if results["fits"] else 2


def write_table(argv: Sequence[str]) -> int:
    """Write the table of shipped configs; what was compiled before is not again."""
    if config_flags.config_arguments(argv):
        raise UserError("--table takes the shipped configs: leave --config out")
    args = command_line.parse(argv, define_flags, needs_config=False)
    if args.json:
        raise UserError("--json does not go with --table, which is Markdown")
    topologies.prepare()
    from bertjax.measuring import estimates_table

    estimates_table.write(args.table, args.topology, args.quick, preflight, cli.say)
    return 0


def preflight(
    config: ConfigDict,
    topology: str,
    say: Callable[[str], None],
    quick: bool = False,
    search: bool = True,
) -> dict[str, Any]:
    """Return what `--json` prints: the phase that needs most memory, and all phases.

    quick, search: see estimates.estimate.
    Raises UserError when the config and the topology do not go together.
    """
    if config.data.train:
        prepared_text.check_inputs(config)
    devices = topologies.find_devices(topology)

    from bertjax.measuring import compile_steps, estimates

    vocab_size, text = look_at_text(config, say)
    config = with_choices(config, text)
    target = compile_steps.Target(config, vocab_size, topology, devices)
    if not target.objective.flops:
        say(train_step.no_mfu(config))
    found = []
    for shape in target.shapes():
        said = {"attention": target.attention(shape)}
        found.append(said | estimates.estimate(target, shape, say, quick, search))
    worst = max(found, key=lambda f: (not f["fits"], f["hbm_gib"] or 0))
    chip = target.chip
    return {
        "topology": topology,
        "devices": len(devices),
        "chips": len(devices) // chip.devices,
        "hosts": target.hosts,
        "mesh": dict(target.mesh.shape),
        "accumulate": config.accumulate,
        **worst,
        "phases": found,
        "data": text,
        "tensorflow": tensorflow_grabs(config),
        "versions": compile_steps.versions(),
    }


def look_at_text(
    config: ConfigDict, say: Callable[[str], None]
) -> tuple[int, list[dict[str, Any]] | None]:
    """Return the vocabulary's size, and of data.train how full the rows are.

    Without data.train the size is the config's own.
    """
    if not config.data.train:
        return config.model.vocab_size or config.data.vocab_size, None
    from bertjax.objectives.base import make_objective

    prepared = prepared_text.prepare(config, say)
    tokenizer = prepared.tokenizer
    cfg = resolve.encoder_config(config, tokenizer.vocab_size)
    needs = make_objective(config.objective, cfg)[0].needs
    tables = run_batches.make_tables(
        config, tokenizer, prepared_text.count_tokens(prepared.parts)
    )
    run = run_batches.make_run(config, needs, tokenizer, prepared.parts, tables)
    found = []
    for stage in run.course.stages:
        batches = [stage.batch(stage.start + i, slice(0, ROWS)) for i in range(LOOK)]
        rows = sum(len(b["input_ids"]) for b in batches)
        slots = sum(b["input_ids"].size for b in batches)
        real = sum(int(b["attention_mask"].sum()) for b in batches)
        masked = [b["mlm_weights"] for b in batches if "mlm_weights" in b]
        chosen = sum(int((weights > 0).sum()) for weights in masked)
        facts = {"start": stage.start, "length": stage.length}
        facts |= {"batch_size": stage.batch_size, "rows_an_epoch": stage.n}
        facts |= {"sequences_per_row": slots // (rows * stage.length)}
        facts |= {"fill": real / slots, "slots_per_row": stage.P}
        found.append({**facts, "predictions_per_row": chosen / rows})
    return tokenizer.vocab_size, found


def tensorflow_grabs(config: ConfigDict) -> str:
    """Say whether TensorFlow, beside jax, might take the accelerator for itself."""
    if importlib.util.find_spec("tensorflow") is None:
        return "not installed"
    engine = "" if config.data.engine == "tf" else ", and data.engine does not load it"
    for name in ("tensorflow-cpu", "tensorflow-tpu", "tensorflow"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        said = f"{name} {version}"
        if name == "tensorflow-cpu":
            return f"{said} knows no accelerator"
        if name == "tensorflow-tpu":
            return f"WARNING: {said} takes the TPU: install tensorflow-cpu{engine}"
        return f"{said}: GPUs are hidden from it{engine}"
    return f"a build of its own: WARNING, it may take the accelerator{engine}"


def describe(results: dict[str, Any]) -> list[str]:
    """Write results as lines for people."""
    versions = ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    axes = " ".join(f"{k}={v}" for k, v in results["mesh"].items())
    lines = [
        f"{results['topology']}: {results['chips']} chips, {results['devices']} "
        f"devices, {results['hosts']} hosts; mesh {axes}; {versions}"
    ]
    for phase in results["phases"]:
        lines += ["", *_describe_phase(phase, results["accumulate"])]
    lines += ["", *_describe_text(results)]
    return [*lines, "", verdict(results)]


def _describe_phase(phase: dict[str, Any], accumulate: int) -> list[str]:
    from bertjax.measuring import estimates, memory_analysis

    def line(name: str, said: str) -> str:
        return f"  {name:26} {said}"

    head = f"{phase['batch_size']} rows of {phase['length']} tokens"
    if accumulate > 1:
        head += f" in {accumulate} micro-batches"
    lines = [f"{head}, {phase['rows_per_device']} rows a device at once"]
    lines.append(line("attention", phase["attention"]))
    need, have = phase["hbm_gib"], phase["hbm_gib_available"]
    said = "more than there is" if need is None else f"{need:.2f} GiB"
    room = memory_analysis.PROGRAM_BYTES / 2**30
    free = f", and {room:g} kept free for the program's code"
    code = "" if "program" in phase["hbm_parts_gib"] else free
    lines.append(line("memory a device", f"{said} of {have:.2f} GiB{code}"))
    for part, gib in phase["hbm_parts_gib"].items():
        lines.append(line(f"  {part}", f"{gib:.3f} GiB"))
    largest = phase["largest_batch_per_device"]
    more = ", or more" * (largest * phase["length"] >= estimates.MOST)
    said = f"{largest} rows at once{more}, by the compiler's early report"
    lines.append(line("largest batch a device", said))
    if phase["eval_fits"] is not None:
        said = "does not fit" if phase["eval_hbm_gib"] is None else ""
        said = said or f"{phase['eval_hbm_gib']:.2f} GiB{free}"
        lines.append(line("evaluation", said))
    if phase["estimated_step_ms"] is not None:
        rate = phase["estimated_tokens_per_second_per_chip"]
        lines += [
            line("step, ESTIMATED", f"{phase['estimated_step_ms']:.2f} ms by cycles"),
            line("tokens/s a chip, ESTIMATED", f"{rate:,.0f}"),
        ]
        if phase["estimated_mfu"] is not None:
            lines.append(line("MFU, ESTIMATED", f"{phase['estimated_mfu']:.3f}"))
    if phase["kernels"]:
        said = f"{phase['kernels']} a step, {phase['estimated_kernel_ms']:.2f} ms of it"
        lines.append(line("custom kernels", f"{said} by formula, not by cycles"))
    for loop in phase["uncounted_loops"]:
        lines.append(line("WARNING", f"loop {loop} is counted once: the time is short"))
    for kind, n in phase["collectives"].items():
        said = f"{n['count']} a step, {n['bytes'] / 2**20:,.1f} MiB (not in the time)"
        lines.append(line(kind, said))
    return lines


def _describe_text(results: dict[str, Any]) -> list[str]:
    lines = []
    hosts = results["hosts"]
    for phase in results["data"] or ():
        lines.append(
            f"text: rows of {phase['length']} are {phase['fill']:.1%} full, padding is "
            f"{1 - phase['fill']:.1%}; {phase['predictions_per_row']:.1f} of "
            f"{phase['slots_per_row']} positions a row are predicted; "
            f"{phase['rows_an_epoch']:,} rows an epoch"
        )
    if results["data"] is None:
        lines.append("text: data.train is empty, so padding is not known")
    lines.append(
        f"hosts: each of {hosts} makes {results['batch_size'] / hosts:g} rows a step, "
        "any of them from any place in the store, which has no parts to deal out"
    )
    return [*lines, f"TensorFlow: {results['tensorflow']}"]


def verdict(results: dict[str, Any]) -> str:
    """Say in one line whether it fits, and if not what would."""
    at = f"{results['batch_size']} rows of {results['length']} tokens"
    if results["fits"]:
        return f"fits: {at} on {results['topology']}"
    need, have = results["hbm_gib"], results["hbm_gib_available"]
    counted = "program" in results["hbm_parts_gib"]
    if results["eval_fits"] and not counted and need is not None and need <= have:
        return (
            f"may not fit: {at} on {results['topology']}, by how much the program's "
            "code takes; without --quick it is compiled to the end, and counted"
        )
    said = f"does not fit: {at} on {results['topology']}"
    wanted = results["accumulate_to_fit"]
    if wanted and wanted > results["accumulate"]:
        return f"{said}; --config.accumulate={wanted} may"
    why = "not even a row a device"
    if results["eval_fits"] is False:
        why = "the evaluation is too large beside the optimizer's state"
    hints = "a larger slice, mesh.fsdp, model.remat=full or shorter rows"
    return f"{said}, {why}; try {hints}"


if __name__ == "__main__":
    cli.command(main)
