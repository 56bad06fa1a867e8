# SPDX-License-Identifier: Apache-2.0
"""Finetune with many seeds and rates in one program, and measure their spread.

python -m bertjax.sweep --config=finetune/classify.py --workdir=DIR --seeds=5
    [--lrs=2e-5,3e-5] [--at_once=N] [--json] [--config.KEY=VALUE ...]

A seed determines the new head, dropout and the order of the rows. DIR gets the best run
by the first metric of the first validation set, for predict and convert, and sweep.json
with the scores of all runs. --config.eval.best=auto compares runs at their best
evaluations, and keeps the best one's parameters from there; --config.eval.patience=N
ends a run after N evaluations without improvement. SIGTERM and SIGINT save all runs
(status 143, 130). Repeat the command to resume; with more --seeds or --lrs a finished
sweep trains the new runs.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError, counted
from bertjax.assembly import (
    command_line,
    init_from,
    prepared_text,
    resolve,
    validate,
    workdirs,
)
from bertjax.checkpoints import manifest, workdir_kinds
from bertjax.config import cli, durations, schema, serialize
from bertjax.config.arguments import split_arguments
from bertjax.config.flag_help import Flag, shared
from bertjax.parallel.host_memory import keep_freed_memory
from bertjax.storage import directories
from bertjax.sweeps import score_spread
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.tables import silent
from bertjax.training.signals import Stopped, StopSignal

# Keys of single runs that a sweep does not support, and those without effect on it.
UNSUPPORTED = "optim.ema", "budget_minutes", "profile.steps", "steps_per_call"
UNSUPPORTED = *UNSUPPORTED, "guard.nonfinite", "optim.freeze", "teacher"
IGNORED = "log.", "checkpoint.", "guard.rewinds"


FLAGS = {
    **shared("workdir"),
    "seeds": Flag("runs per learning rate", 5, least=1),
    "lrs": Flag("learning rates, separated by commas; default: optim.lr", []),
    "at_once": Flag(
        "runs trained side by side; default: as many as fit", kind=int, least=1
    ),
    **shared("json"),
}


def main(argv: Sequence[str]) -> int:
    stop = StopSignal()
    stop.install()
    args = command_line.parse(argv, FLAGS, __doc__)
    if not args.workdir:
        raise UserError("--workdir is missing: the directory of the sweep")
    path = manifest.local_workdir(args.workdir)
    given = split_arguments(argv)[0]
    try:
        found = run(given, args.seeds, args.lrs, args.at_once, path, stop)
    except Stopped as e:
        return e.status
    print(json.dumps(found) if args.json else "\n".join(score_spread.describe(found)))
    return 0


def run(
    argv: Sequence[str],
    seeds: int,
    lrs: Sequence[str],
    at_once: int | None,
    path: Path,
    stop: StopSignal | None = None,
) -> dict[str, Any]:
    """Check everything, then sweep over `seeds` seeds x rates, in the workdir `path`.

    argv: the config and its overrides; lrs: if empty, the config's rate. Raises
    UserError, and Stopped after a signal to `stop`, once all runs are saved.
    """
    args = command_line.parse(argv)
    config, overrides = args.config, json.loads(args.overrides)
    rates = read_rates(lrs or [str(config.optim.lr)])
    check(config, overrides)
    resolve.set_flags(config)
    if config.init_from:
        if lost := workdirs.explain_lost_source(path, config):
            raise UserError(lost)
        init_from.check_init_from(config.init_from)
    prepared_text.check_inputs(config)
    workdirs.check_place(path)
    first = config.seed
    runs = [(seed, rate) for rate in rates for seed in range(first, first + seeds)]
    with directories.lock(path):
        return sweep(config, path, runs, at_once, overrides, stop)


def read_rates(given: Sequence[str]) -> list[float]:
    """Parse learning rates. Raises UserError."""
    rates: list[float] = []
    with contextlib.suppress(ValueError):
        rates = [float(word) for word in given]
    if not rates or len({r for r in rates if 0 < r < 1e3}) < len(rates):
        raise UserError(f"--lrs={','.join(given)}: give different numbers above 0")
    return rates


def check(config: ConfigDict, overrides: Mapping[str, Any]) -> None:
    """Refuse configs that a sweep cannot run. Raises UserError."""
    validate.check(config)
    if not tasks.is_task(config):
        raise UserError(
            f"objective={config.objective}: a sweep finetunes on labelled rows: take "
            "such a config, for instance --config=finetune/classify.py, and name the "
            "rows' columns (task.text, task.label) or a task (task.name)"
        )
    if not config.data.valid:
        raise UserError(
            "data.valid is empty: a sweep needs it to see which run is best"
        )
    flat, usual = serialize.flatten(config), serialize.flatten(schema.base())
    for key in UNSUPPORTED:
        if flat[key] != usual[key]:
            raise UserError(f"{key}={flat[key]} does not go with a sweep")
    unit, length = durations.unit_of(config, "optim.average")
    if length:
        raise UserError(f"optim.average.{unit}={length} does not go with a sweep")
    for key in overrides:
        if key.startswith(IGNORED) and flat.get(key) != usual.get(key):
            raise UserError(
                f"{key}={flat.get(key)} has no effect in a sweep, which saves at each "
                f"evaluation (eval.every) and reports all in {workdir_kinds.RESULTS}"
            )


def sweep(
    config: ConfigDict,
    path: Path,
    runs: Sequence[tuple[int, float]],
    at_once: int | None,
    overrides: dict[str, Any],
    stop: StopSignal | None = None,
) -> dict[str, Any]:
    """Train all runs (seed, rate) to the end, and return the content of sweep.json.

    Raises UserError, and Stopped like `run`.
    """
    import jax

    from bertjax.assembly import training_run
    from bertjax.parallel import feed
    from bertjax.parallel.mesh import make_mesh
    from bertjax.sweeps.trainer import SweepLoop, check_finished, forget_members

    before = workdir_kinds.read_object(path / workdir_kinds.RESULTS)
    if not before:
        workdir_kinds.check_sweep(path, runs)
    mesh = make_mesh(**config.mesh)
    feed.check_batch_size(mesh, config.batch_size, config.accumulate)
    prepared, hashes = text = training_run.prepare(config, cli.say)
    facts = {"config": config.to_dict(), "runs": runs, "stores": hashes}
    facts = json.loads(json.dumps(facts | {"tokenizer": prepared.tokenizer.identity}))
    todo, own = runs, facts
    if before:
        todo = check_finished(path, before, facts, config)
        forget_members(path, before["facts"]["runs"])  # left by a kill just before this
        if not todo:
            cli.say(f"{path} is done")
            return before
        cli.say(f"{path} is done: {counted(len(todo), 'run joins', 'runs join')} it")
        own = facts | {"runs": [*map(list, todo)]}
    base = training_run.TrainingRun(config, path, mesh, text, None, {}, silent)
    loop = SweepLoop(base, todo, own, stop or StopSignal())
    with jax.set_mesh(mesh), contextlib.ExitStack() as stack:
        fresh = not loop.start(at_once) and not before
        stack.callback(loop.groups.close)
        begun = time.monotonic()
        loop.train()
        took = round(time.monotonic() - begun, 1)
    scores = loop.scores.joined_to(before["curve"], runs) if before else loop.scores
    found = scores.summarize()
    found |= {"facts": facts, "seconds": took if fresh else None}
    loop.write_best(found, overrides)
    shutil.rmtree(path / workdir_kinds.MEMBERS)
    return found


if __name__ == "__main__":
    keep_freed_memory()
    cli.command(main)
