# SPDX-License-Identifier: Apache-2.0
"""Estimate what a config costs on a TPU before paying: python -m bertjax.preflight

  --config=bert.py:base   a config, as for bertjax.train
  --topology=v5e:2x4      the slice: v4:2x2x1, v5p:2x2x2, v6e:8x8, tpu7x:2x2x1; two
                          slices are 2xv5e:4x4
  --quick                 memory and the largest batch; times only of programs compiled
                          before: it stops before the compiler writes machine code
  --json                  one JSON object
  --table=FILE            the shipped configs on several slices as a Markdown table:
                          memory on all of them, times on one
  --budget_minutes=180 --what=cpu   instead, estimate what configs/modern.py, or another
                          config, reaches in so many minutes on this machine's CPU: it
                          measures for a minute and chooses the size that fits

The TPU compiler (pip install libtpu; no TPU needed) compiles the update and the
evaluation that bertjax.train would run there. Memory is what the compiler reports. That
excludes the code of a program that was not compiled to the end, for which 0.5 GiB are
kept free. Times are the compiler's estimates; custom kernels are estimated by a formula
(bertjax/parallel/chips.py), and collectives are only counted. With data.train, padding
and predictions come from the text. The exit status is 2 if the config does not fit.
"""

import json
import os
from collections.abc import Sequence

from bertjax import UserError
from bertjax.assembly import command_line, prepared_text, validate
from bertjax.config import cli
from bertjax.config.arguments import split_arguments
from bertjax.config.flag_help import Flag, shared
from bertjax.measuring import topologies
from bertjax.parallel.host_memory import keep_freed_memory
from bertjax.training.signals import StopCommand, Stopped

FLAGS = {
    "topology": Flag("TPU slice, such as v5e:2x4; see above"),
    "table": Flag(
        "write a table of the shipped configs on several slices to this file"
    ),
    "quick": Flag("stop early: report memory but no step time", False),
    "budget_minutes": Flag(
        "recommend a model for this many minutes on this machine", kind=float
    ),
    "what": Flag("with --budget_minutes: the device, cpu"),
    **shared("json"),
}


def main(argv: Sequence[str]) -> int:
    StopCommand().install()  # the compiler's own handler would print its stack
    names = {a.split("=")[0].lstrip("-") for a in argv}
    work = write_table if "table" in names else show
    try:
        return (plan_minutes if names & {"budget_minutes", "what"} else work)(argv)
    except Stopped as e:
        return e.status


def show(argv: Sequence[str]) -> int:
    """Print what one config needs on one topology."""
    args = command_line.parse(argv, FLAGS, __doc__)
    validate.check(args.config)
    prepared_text.check_concepts(args.config)
    topology = args.topology or topologies.DEFAULT
    topologies.parse(topology)
    topologies.prepare()
    if not args.topology:
        cli.say(f"no --topology: {topology}, eight chips of the smallest kind")
    from bertjax.measuring import estimates, estimates_text

    results = estimates.estimate_config(args.config, topology, cli.say, args.quick)
    if args.json:
        print(json.dumps(results))
    else:
        print("\n".join(estimates_text.describe(results)))
    return 0 if results["fits"] else 2


def plan_minutes(argv: Sequence[str]) -> int:
    """Measure this machine, and print what fits into the given minutes."""
    given, own = split_arguments(argv)
    args = command_line.parse(own, FLAGS, __doc__, needs_config=False)
    minutes = args.budget_minutes
    if args.what != "cpu" or minutes is None or not 0 < minutes < 1e7:
        raise UserError(
            "--budget_minutes and --what go together: the minutes of training, above "
            "0, and --what=cpu, this machine's"
        )
    for name in ("topology", "table", "quick"):
        if getattr(args, name):
            raise UserError(f"--{name} is for TPUs: leave it out with --budget_minutes")
    os.environ["JAX_PLATFORMS"] = "cpu"
    keep_freed_memory()  # as bertjax.train does
    from bertjax.measuring import budget_plan

    has_file = any(word.startswith(("--config=", "-config=")) for word in given)
    given = given if has_file else ["--config=modern.py", *given]
    found = budget_plan.plan_budget(given, minutes, cli.say)
    rest = [word for word in given if not word.startswith(("--config=", "-config="))]
    if args.json:
        print(json.dumps(found))
    else:
        print("\n".join(budget_plan.describe(found, rest)))
    return 0


def write_table(argv: Sequence[str]) -> int:
    """Write the table of shipped configs; reuse programs that were compiled before."""
    if split_arguments(argv)[0]:
        raise UserError("--table takes the shipped configs: leave --config out")
    args = command_line.parse(argv, FLAGS, __doc__, needs_config=False)
    if args.json:
        raise UserError("--json does not go with --table, which is Markdown")
    topologies.prepare()
    from bertjax.measuring import estimates_table

    estimates_table.write(args.table, args.topology, args.quick, cli.say)
    return 0


if __name__ == "__main__":
    cli.command(main)
