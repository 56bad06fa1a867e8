# SPDX-License-Identifier: Apache-2.0
"""Finetune with many seeds and rates in one program, and say how much they scatter.

python -m bertjax.sweep --config=finetune/classify.py --workdir=DIR --seeds=5
    [--lrs=2e-5,3e-5] [--at_once=N] [--json] [--config.KEY=VALUE ...]

A seed decides the new head, dropout and the order of the rows. DIR holds the best run,
by the first metric of the first validation set, for predict and convert, and in
sweep.json the scores of all. SIGTERM and SIGINT save all runs (status 143, 130). Repeat
the command to resume.
"""

import contextlib
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from bertjax import UserError, build, checks, disk, updates
from bertjax import config as c
from bertjax.tasks import prepare as tasks
from bertjax.training import manifest, spread, workdir
from bertjax.training.signals import Stopped, StopSignal

RESULTS = "sweep.json"
SILENT = "log.", "checkpoint.", "guard.rewinds"  # keys of single runs
OTHER = (
    "holds another run, or a sweep of another config, other text, seeds or rates: "
    "take another workdir"
)


def define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    flags.DEFINE_integer("seeds", 5, "", lower_bound=1, flag_values=values)
    flags.DEFINE_list("lrs", [], "", flag_values=values)
    flags.DEFINE_integer("at_once", None, "", lower_bound=1, flag_values=values)
    flags.DEFINE_boolean("json", False, "", flag_values=values)


def main(argv: Sequence[str]) -> int:
    stop = StopSignal()
    stop.install()
    args = c.parse(argv, define_flags)
    if not args.workdir:
        raise UserError("--workdir is missing: the directory the sweep lives in")
    path = Path(args.workdir).expanduser().absolute()  # orbax wants one
    given = c.config_arguments(argv)
    try:
        found = run(given, args.seeds, args.lrs, args.at_once, path, stop)
    except Stopped as e:
        return e.status
    print(json.dumps(found) if args.json else "\n".join(spread.describe(found)))
    return 0


def run(
    argv: Sequence[str],
    seeds: int,
    lrs: Sequence[str],
    at_once: int | None,
    path: Path,
    stop: StopSignal | None = None,
) -> dict[str, Any]:
    """Check everything and sweep over `seeds` seeds x rates, in the workdir `path`.

    argv: the config and its overrides; lrs: none takes the config's. Raises UserError,
    and Stopped when `stop` told of a signal and all runs are saved.
    """
    args = c.parse(argv)
    config = args.config
    rates = read_rates(lrs or [str(config.optim.lr)])
    checks.check(config)
    if not tasks.is_task(config) or not config.data.valid:
        raise UserError("a sweep needs a task and data.valid, which says what is best")
    given = {"optim.ema": config.optim.ema, "budget_minutes": config.budget_minutes}
    given |= {f"eval.{key}": config.eval[key] for key in ("best", "patience")}
    given |= {"profile.steps": config.profile.steps}
    if config.steps_per_call > 1:
        given["steps_per_call"] = config.steps_per_call
    if config.guard.nonfinite != "skip":
        given["guard.nonfinite"] = config.guard.nonfinite
    for key, value in given.items():
        if value:
            raise UserError(f"{key}={value} does not go with a sweep")
    flat, usual = c.flatten(config), c.flatten(c.base())
    for key in json.loads(args.overrides):
        if key.startswith(SILENT) and flat.get(key) != usual.get(key):
            raise UserError(
                f"{key}={flat.get(key)} says nothing to a sweep, which saves with each "
                f"evaluation (eval.every) and tells all in {RESULTS}"
            )
    c.set_flags(config)
    build.check_inputs(config)
    if config.init_from:
        disk.check_init_from(config.init_from)
    disk.check_workdir(path, config, allow_change=True)
    first = config.seed
    runs = [(seed, rate) for rate in rates for seed in range(first, first + seeds)]
    lock = workdir.lock(path)
    try:
        return sweep(config, path, runs, at_once, json.loads(args.overrides), stop)
    finally:
        lock.close()


def read_rates(given: Sequence[str]) -> list[float]:
    """Read learning rates. Raises UserError."""
    try:
        rates = [float(word) for word in given]
    except ValueError:
        rates = []
    fine = rates and all(0 < r < 1e3 for r in rates)
    if not fine or len({*rates}) < len(rates):
        raise UserError(f"--lrs={','.join(given)}: different numbers above 0, please")
    return rates


def sweep(
    config: c.ConfigDict,
    path: Path,
    runs: Sequence[tuple[int, float]],
    at_once: int | None,
    overrides: dict[str, Any],
    stop: StopSignal | None = None,
) -> dict[str, Any]:
    """Train all runs (seed, rate) to the end and return what sweep.json holds.

    Raises UserError, and Stopped as `run` does.
    """
    import jax
    import jax.numpy as jnp

    from bertjax.data.progress import Progress
    from bertjax.data.stream import stream
    from bertjax.objectives.base import make_objective
    from bertjax.parallel import feed
    from bertjax.parallel.mesh import make_mesh
    from bertjax.parallel.sharding import batch_sharding
    from bertjax.training import members, state
    from bertjax.training.checkpoint import Checkpoints

    stop = stop or StopSignal()
    mesh = make_mesh(**config.mesh)
    feed.check_batch_size(mesh, config.batch_size, config.accumulate)
    prepared = build.prepare(config, c.say)
    tokenizer, parts = prepared.tokenizer, prepared.parts
    cfg = c.encoder_config(config, tokenizer.vocab_size, jax.default_backend())
    objective, cfg = make_objective(tasks.objective_of(config, parts), cfg)
    hashes = build.content_hashes(config, prepared)
    facts = {"config": config.to_dict(), "runs": runs, "stores": hashes}
    facts = json.loads(json.dumps(facts | {"tokenizer": tokenizer.identity}))
    before = workdir.read_json(path / RESULTS)
    if is_same(before.get("facts", {}), facts, config):
        c.say(f"{path} is done")
        return before
    if before or (manifest.steps(path) and not (path / "members").exists()):
        raise UserError(f"--workdir={path} {OTHER}")
    tables = build.make_tables(config, tokenizer, build.count_tokens(parts))

    def plan(seed: int) -> build.Run:
        own = config.copy_and_resolve_references()
        own.seed = seed
        return build.make_run(own, objective.needs, tokenizer, parts, tables)

    planned = {seed: plan(seed) for seed, _ in runs}
    first = planned[runs[0][0]]
    total = first.total
    every = updates.intervals(config, first.phases[0], total)["eval"]
    valid = build.make_valid(config, objective.needs, tokenizer, prepared.valid, tables)
    lengths = updates.schedule_lengths(config, first.phases, total)
    warmup, decay, span = lengths
    update = updates.make_update(config, objective, mesh, warmup, span, decay)
    rows = first.course.batch(0)
    programs = updates.make_programs(config, objective, update, lengths, rows, mesh)
    size = held_at_once(path, len(runs), at_once)
    if size is None:
        size = updates.runs_at_once(programs, mesh, len(runs), at_once)
    filled = members.fill(runs, size)  # the last ones repeated, and not looked at
    groups = [filled[i : i + size] for i in range(0, len(filled), size)]
    seeds = [np.array([s for s, _ in g], np.int32) for g in groups]
    rates = [np.array([r for _, r in g], np.float32) for g in groups]
    c.say(f"{len(runs)} runs of {total:,} steps, {size} at once")
    folders = [path / "members" / str(i) for i in range(len(groups))]
    saved = [Checkpoints(folder, 2, None) for folder in folders]
    there = [manifest.steps(folder) for folder in folders]
    done = max(set.intersection(*map(set, there)), default=0)
    scores: list[dict[str, Any]] = []
    streaks = [0] * len(runs)  # the longest of updates skipped in a row
    if done:
        before = manifest.read_meta(path / "members/0/checkpoints" / str(done))
        if not is_same(before, facts, config):
            raise UserError(f"--workdir={path} {OTHER}")
        scores, streaks = before["scores"], before.get("streaks", streaks)
        c.say(f"resuming after step {done}")
    with contextlib.ExitStack() as stack, jax.set_mesh(mesh):
        for one in saved:
            stack.callback(one.close)
        if done:
            wanted = programs.shapes(size)[0]
            states = [s.restore(done, wanted) for s in saved]
        else:
            states = [programs.begin(s) for s in seeds]
            if config.init_from:
                asked = state.with_shardings(update.shapes, update.shardings).params
                task = tasks.facts(config, parts).get("task", {})
                taken = disk.take(config.init_from, tokenizer, asked, c.say, task)
                states = [members.give_params(s, taken) for s in states]
        one_run, many_runs = batch_sharding(mesh), members.stack(batch_sharding(mesh))
        examples = config.eval.examples or None

        def make(at: int) -> dict[str, np.ndarray]:
            made = {seed: run.course.batch(at) for seed, run in planned.items()}
            names = made[runs[0][0]]
            return {k: np.stack([made[seed][k] for seed, _ in filled]) for k in names}

        def batches(function: Any) -> Iterator[Any]:
            for batch in function.eval_batches(config.batch_size, examples):
                if stop.overdue:
                    raise Stopped(stop.number)
                yield jax.device_put(batch, one_run)

        def score(name: str, function: Any) -> Iterator[dict[str, Any]]:
            params = [s.params for s in states]
            found = members.score(programs.evaluate, params, batches(function))
            skips = np.concatenate([np.asarray(s.guard.skipped) for s in states])
            for i, (seed, rate) in enumerate(runs):
                means, told = found[i]
                row = {"step": done, "seed": seed, "lr": rate, "valid": name}
                row["skipped"] = int(skips[i])
                values = {**means, **function.score(told, examples)}
                if streaks[i] >= config.guard.patience:
                    values = dict.fromkeys(values, math.nan)
                yield row | workdir.finite(values)

        def look() -> None:
            """Take the longest streaks off the devices; say which runs they end."""
            now = np.concatenate([*map(np.asarray, longest)])
            for i in range(len(runs)):
                before, streaks[i] = streaks[i], max(streaks[i], int(now[i]))
                if before < config.guard.patience <= streaks[i]:
                    seed, rate = runs[i]
                    told = f"{config.guard.patience} updates in a row were not finite"
                    c.say(f"seed {seed}, lr {rate:g}: {told}, or spikes: it is lost")

        def judge() -> list[dict[str, Any]] | None:
            """Return a row for each run and validation set, where that is due.

            None when a signal, and then some seconds, broke it off.
            """
            if done % every and done != total:
                return []
            look()
            try:
                return [row for one in valid.items() for row in score(*one)]
            except Stopped:
                return None

        longest = [jnp.zeros(len(s), jnp.int32) for s in seeds]
        stop.training = True
        begun, started, asked = time.monotonic(), done, 0
        if done and all(row["step"] < done for row in scores):
            owed = judge()  # a signal broke it off
            scores += owed or []
            asked = stop.number if owed is None else 0
        with Progress("sweep", total=total - done, unit="steps") as progress:
            steps = () if asked else stream(make, done, total, config.data.engine)
            for batch in steps:
                for i in range(len(groups)):
                    mine = slice(i * size, (i + 1) * size)
                    fed = {k: v[mine] for k, v in batch.items()}
                    fed = jax.device_put(fed, many_runs)
                    states[i], told = programs.advance(
                        states[i], fed, seeds[i], rates[i]
                    )
                    longest[i] = jnp.maximum(longest[i], told["streak"])
                done += 1
                progress.add(1)
                judged = judge()
                scores += judged or []
                asked = stop.number
                if judged or asked:
                    look()
                    told = {"size": size, "scores": scores, "streaks": streaks}
                    for one, held in zip(saved, states, strict=True):
                        one.save(done, held, {**facts, **told})
                if asked:
                    break
        took = time.monotonic() - begun
    stop.training = False
    if asked:
        c.say(f"stopped by a signal after step {done}, which is saved")
        raise Stopped(asked)
    metric = first_metric(config)
    found = spread.summarise(scores, runs, total, next(iter(valid)), metric)
    found |= {"facts": facts, "seconds": None if started else round(took, 1)}
    best = runs.index((found["best"]["seed"], found["best"]["lr"]))
    params = members.take(states[best // size].params, best % size)
    keep(config, path, found, params, prepared, overrides, hashes)
    shutil.rmtree(path / "members")
    return found


def is_same(
    before: Mapping[str, Any], facts: Mapping[str, Any], config: c.ConfigDict
) -> bool:
    """Tell whether a sweep of `before` is that of these facts, `config`'s own.

    Configs are compared as those of runs are: keys that came later have their defaults.
    """
    if not before or any(before.get(k) != facts[k] for k in facts.keys() - {"config"}):
        return False
    try:
        old = c.from_json(json.dumps(before["config"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return False
    return not c.differences(old, config)


def held_at_once(path: Path, runs: int, asked: int | None) -> int | None:
    """Return how many runs of a sweep are in one checkpoint; None where there is none.

    What fits next time may be another number. Raises UserError where another one is
    asked for.
    """
    from bertjax.training import members

    first = path / "members/0"
    there = manifest.steps(first)
    if not there:
        return None
    size = manifest.read_meta(first / "checkpoints" / str(there[-1]))["size"]
    if asked and members.group_size(runs, lambda n: n <= asked) != size:
        raise UserError(f"--at_once={asked}: this sweep began with {size} at once")
    return size


def first_metric(config: c.ConfigDict) -> str:
    """Return the metric that says which run is the best."""
    return tasks.make_form(config).metrics[0]


def keep(
    config: c.ConfigDict,
    path: Path,
    found: dict[str, Any],
    params: Any,
    prepared: Any,
    overrides: dict[str, Any],
    hashes: dict[str, str],
) -> None:
    """Write the best run as a workdir, and last sweep.json, which says it is done."""
    from bertjax.training.checkpoint import Checkpoints

    config = config.copy_and_resolve_references()
    config.seed, config.optim.lr = found["best"]["seed"], found["best"]["lr"]
    workdir.begin(
        path,
        {
            "config.json": c.to_json(config),
            "overrides.json": json.dumps(overrides),
        },
        {"stores": hashes, "total_steps": found["steps"]},
        prepared.tokenizer.save,
        build.count_tokens(prepared.parts),
    )
    disk.write_findings(path, prepared, c.say)
    if found["steps"] not in manifest.steps(path):  # else killed just after it
        meta = {"config": config.to_dict(), "tokenizer": prepared.tokenizer.identity}
        meta |= {"stores": hashes, "tokens": 0, **tasks.facts(config, prepared.parts)}
        tasks.learn(meta, found["best"])
        saved = Checkpoints(path, 2, None)
        saved.save(found["steps"], {"params": params}, meta)
        saved.close()
    workdir.write_text(path / RESULTS, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    c.command(main)
