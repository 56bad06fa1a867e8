# SPDX-License-Identifier: Apache-2.0
"""Pretrain a masked language model: python -m bertjax.train --config=... --workdir=...

Repeat the command to resume: the run ends with the same parameters, bit for bit.
"""

import functools
import itertools
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags
from ml_collections.config_dict import ConfigDict

from bertjax import RunError, UserError, __version__
from bertjax.assembly import (
    batches,
    best_metric,
    command_line,
    init_from,
    prepared_text,
    resolve,
    train_step,
    validate,
    workdirs,
)
from bertjax.checkpoints import best, manifest, workdir
from bertjax.config import cli, serialize
from bertjax.data import phases
from bertjax.parallel.watch import Watch
from bertjax.storage import directories
from bertjax.tasks import prepare_task as tasks
from bertjax.training.signals import StopSignal

LAG = 1  # steps in flight while the host looks at the one before


def define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    flags.DEFINE_boolean(
        "multihost",
        False,
        "one of several processes of a run, one a host",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "dry_run", False, "build everything, print it and stop", flag_values=values
    )
    flags.DEFINE_boolean(
        "allow_config_change",
        False,
        "go on in a workdir whose run had another config",
        flag_values=values,
    )


def main(argv: Sequence[str]) -> int:
    stop = StopSignal()
    stop.install()
    args = command_line.parse(argv, define_flags)
    if not args.workdir and not args.dry_run:
        raise UserError("--workdir is missing: the directory the run lives in")
    with Watch(args.config.hosts.timeout) as watch:
        stop.leave = watch.leave
        return train(
            args.config,
            args.workdir,
            overrides=json.loads(args.overrides),
            multihost=args.multihost,
            dry_run=args.dry_run,
            allow_config_change=args.allow_config_change,
            stop=stop,
            watch=watch,
        )


def train(
    config: ConfigDict,
    directory: str | None,
    *,
    overrides: dict[str, Any] | None = None,
    multihost: bool = False,
    dry_run: bool = False,
    allow_config_change: bool = False,
    stop: StopSignal | None = None,
    watch: Watch | None = None,
) -> int:
    """Train to the end of the config, from where the workdir `directory` stands.

    Returns the exit status: 0 done, 143 or 130 after a signal. Raises UserError, and
    RunError when a loss is not finite or no checkpoint is whole.
    """
    stop, watch = stop or StopSignal(), watch or Watch(config.hosts.timeout)
    begun = time.monotonic()

    # ------------------------------------------------------------ 1. what can be seen
    validate.check(config)
    path = None if dry_run else manifest.as_path(directory)
    if config.init_from and not (path and manifest.steps(path)):
        init_from.check_init_from(config.init_from)
    prepared_text.check_inputs(config)
    if path is not None:
        workdirs.check_workdir(path, config, allow_config_change)

    finished = functools.partial(
        workdir.is_done, scored=bool(config.data.valid), longer=allow_config_change
    )
    restored = held = None
    over = same = False  # it is at its end; by the names its text need not be looked at
    if path is not None and not multihost:
        held = directories.lock(path)
        restored = manifest.newest_intact(path, cli.say)
        over, same = finished(path, restored), workdirs.names_its_text(path, config)
        if over and same:
            cli.say(f"{path} is done: step {restored}")
            return 0
    resolve.set_flags(config)

    # ------------------------------------------------------------ 2. the processes
    import jax

    from bertjax.models import attention
    from bertjax.models.encoder import count_params
    from bertjax.objectives.base import TokenIds, make_objective
    from bertjax.parallel import feed, hosts
    from bertjax.parallel.mesh import machine, make_mesh, peak_flops, peak_memory

    if multihost:
        watch.start(*hosts.initialize(watch.limit, watch.heartbeats))
        if hosts.is_primary() and path is not None:
            held = directories.lock(path)
            restored = manifest.newest_intact(path, cli.say)
        restored = hosts.from_primary(restored)
        over = finished(path, restored)
        same = over and workdirs.names_its_text(path, config)
        over, same = hosts.from_primary([over, same])
        if over and same:
            if hosts.is_primary():
                cli.say(f"{path} is done: step {restored}")
            return 0
    primary = hosts.is_primary()
    speak = cli.say if primary else lambda text: None
    mesh = make_mesh(**config.mesh)
    for size in {
        config.batch_size,
        *(p.batch_size for p in resolve.wanted_phases(config)),
    }:
        feed.check_batch_size(mesh, size, config.accumulate)
    # Of a model with one piece: what can be refused before the text is read.
    objective, _ = make_objective(config.objective, resolve.encoder_config(config, 1))
    resolve.check_plan(config, objective.needs)
    train_step.check_whole_batch(config, objective, mesh)

    # ------------------------------------------------------------ 3. the data
    if primary:
        prepared = prepared_text.prepare(config, speak)
    hosts.barrier("prepared")
    if not primary:  # finds it on a shared disk, makes its own elsewhere
        prepared = prepared_text.prepare(config, speak)
    hashes = prepared_text.content_hashes(config, prepared)
    hosts.check_equal("the prepared text", [*hashes.values()])
    said = {}
    if path is not None and restored is not None:
        said = manifest.read_meta(path / "checkpoints" / str(restored))
        workdir.check_text(path, said["stores"], hashes)
        if over:
            new = ", ".join(sorted(hashes.keys() - said["stores"].keys()))
            left = f"; data.valid: {new}: not scored, bertjax.evaluate does" * bool(new)
            speak(f"{path} is done: step {restored}{left}")
            return 0
        rules = workdir.read_json(path / "run.json").get("row_rules", 1)
        prepared_text.check_rows(config, prepared.parts, path, rules)
    tokenizer = prepared.tokenizer
    cfg = resolve.encoder_config(config, tokenizer.vocab_size, jax.default_backend())
    name, tokens = tasks.objective_of(config, prepared.parts), TokenIds.of(tokenizer)
    objective, cfg = make_objective(name, cfg, tokens)
    counts = prepared_text.count_tokens(prepared.parts)
    tables = batches.make_tables(config, tokenizer, counts, speak)
    make_run = functools.partial(
        batches.make_run, config, objective.needs, tokenizer, prepared.parts, tables
    )
    past = phases.from_plain(said.get("phases", []))
    run = make_run(past=past, at=restored or 0, say=speak)
    course, total = run.course, run.total
    valid = batches.make_valid(
        config, objective.needs, tokenizer, prepared.valid, tables, speak
    )
    if (restored or 0) > total:
        raise UserError(f"total is {total} steps, and {path} is at step {restored}")
    every = train_step.intervals(config, run.phases[0], total)

    # ------------------------------------------------------------ 4. shapes and step
    from bertjax.checkpoints.manager import Checkpoints, merge
    from bertjax.training import multi_step, state, step
    from bertjax.training.budget import describe_budget, make_clock

    begins = *(s.start for s in course.stages), restored or 0  # what is compiled anew
    most = config.steps_per_call
    calls = multi_step.Calls(most, total, (*every.values(),), begins)
    calls.check()
    warmup, decay, span = train_step.schedule_lengths(config, run.phases, total)
    update = train_step.make_update(config, objective, mesh, warmup, span, decay)
    shapes, shardings = update.shapes, update.shardings
    directions = best_metric.directions(objective, shapes.params, course.stages[0])
    judge = best_metric.make_judge(
        config, objective, shapes.params, valid, path, restored, directions
    )
    evaluate = jax.jit(
        step.make_eval_step(objective.sums, objective.weights, objective.evaluate)
    )
    rows = functools.cache(functools.partial(feed.local_rows, mesh))
    micro = train_step.eval_rows(config, objective)
    parameters = count_params(shapes.params)
    where = f"{mesh.size} x {mesh.devices.flat[0].device_kind}, {dict(mesh.shape)}"
    speak(f"{parameters:,} parameters; {total:,} steps; mesh {where}")
    if config.budget_minutes is not None:
        speak(describe_budget(config.budget_minutes, total))
    with jax.set_mesh(mesh):
        lengths = (stage.length for stage in course.stages)
        speak(f"attention: {attention.describe_backend(cfg, lengths)}")
    for line in course.lines():
        speak(line)
    if dry_run:
        from bertjax.reporting.batch_preview import dry_run_lines

        parts = shapes.params, shardings.params, course, config, prepared
        print("\n".join(dry_run_lines(*parts)))
        return 0

    # ------------------------------------------------------------ 5. where to begin
    # In this order: the workdir's checkpoint, init_from's parameters, from scratch.
    saved = Checkpoints(path, config.checkpoint.keep_last, config.checkpoint.keep_every)
    wanted = state.with_shardings(shapes, shardings)
    done, tokens = restored or 0, 0
    if restored is not None:
        current = saved.restore(restored, wanted)
        tokens = said["tokens"]
        speak(f"resuming after step {restored}")
    else:
        current = state.init_sharded(update.init, update.tx, mesh, shardings)
        if config.init_from:
            taken = init_from.take(
                config.init_from,
                tokenizer,
                wanted.params,
                speak,
                tasks.facts(config, prepared.parts).get("task", {}),
            )
            merged = merge(current.params, taken)
            current = state.with_params(current, merged, wanted.ema)
    lived = {"phases": phases.to_plain(run.phases), **judge.facts}
    lived["rewinds"] = rewinds = said.get("rewinds", [])
    facts = {"stores": hashes, "parameters": parameters, "total_steps": total}
    facts |= {"row_rules": prepared_text.ROW_RULES, best.GREATER: directions}
    if primary:  # only now: a refused command leaves the workdir as it was
        workdir.begin(
            path,
            {
                "config.json": serialize.to_json(config),
                "overrides.json": json.dumps(overrides),
            },
            facts | lived | machine(mesh),
            tokenizer.save,
            counts,
        )
        workdirs.write_findings(path, prepared, speak)
    hosts.barrier("workdir")

    # ------------------------------------------------------------ 6. the loop
    from bertjax.data.loader import stream
    from bertjax.training.meter import Meter
    from bertjax.training.trace import Trace
    from bertjax.training.writer import ProgressWriter, make_writers, write

    meta = {"config": config.to_dict(), "tokenizer": tokenizer.identity}
    meta |= {"stores": hashes, "version": __version__}
    meta |= tasks.facts(config, prepared.parts)
    tasks.learn(meta, said.get("task", {}))
    clock = make_clock(path, config.budget_minutes, mesh, done)
    if clock and done:
        speak(f"{clock.elapsed() / 60:.1f} minutes of the budget are spent")
    if judge.over or (clock and hosts.from_primary(clock.over)):
        total = done
    peak = peak_flops(mesh)
    if peak and not objective.flops:
        speak(train_step.no_mfu(config))
    meter = Meter(peak if objective.flops else None, lambda: peak_memory(mesh))
    pending: deque[tuple[int, int, dict[str, jax.Array]]] = deque()
    asked = unscored = False
    seen = bad = 0  # the last step looked at; updates skipped in a row until there

    def begin() -> tuple[list[Any], Iterator[Any], Iterator[Any]]:
        """Open what goes on from `done`: (writers, batches, batches on devices)."""
        files = make_writers(config.log.writers, path, done) if primary else []
        budget = clock and clock.seconds
        files += [ProgressWriter(total, done, budget=budget)] if primary else []
        made = stream(lambda i: course.batch(i, rows), done, total, config.data.engine)
        sizes = (course.at(i).batch_size for i in range(done, total))
        fed = feed.to_devices(made, mesh, sizes)
        if most > 1:
            fed = multi_step.to_devices(made, mesh, sizes, calls.sizes(done), most)
        fed = feed.with_flag(fed, mesh, lambda: bool(stop.number))
        return files, made, clock.stamp(fed, done) if clock else fed

    writers, source, feeder = begin()
    advance = update.many if most > 1 else update.step
    if primary:
        speak = writers[-1].say

    alone = jax.process_count() == 1  # else a signal travels with the batches

    def is_late() -> bool:
        return alone and stop.overdue

    def is_due(name: str) -> bool:
        return done == total or done % every[name] == 0

    def drain(keep: int) -> None:
        """Look at steps that have run; stop where the run has to go back."""
        nonlocal tokens, asked, seen, bad
        while len(pending) > keep and bad < config.guard.patience:
            seen, count, metrics = pending.popleft()
            fresh = seen in begins
            metrics = meter.timed("blocked", jax.device_get, metrics)
            for values in multi_step.rows(metrics, count):
                seen += 1
                asked = values.pop("stop", 0) > 0 or asked  # popped: it is no metric
                real = values.pop("tokens")
                tokens += real
                meter.count(real, *train_step.cost(objective, course.at(seen - 1)))
                bad = values.pop("streak", 0)
                if bad == 1:
                    speak(f"step {seen}: not finite, or a spike: skipped (guard)")
                if clock:
                    values["budget/share"] = clock.see(values.pop("at"))
                wrong = ", ".join(step.non_finite(values))
                if wrong and config.guard.nonfinite == "stop":
                    saved.close()
                    last = f"checkpoint is {(manifest.steps(path) or ['none'])[-1]}"
                    raise RunError(f"step {seen}: {wrong} not finite; last good {last}")
                if bad >= config.guard.patience:
                    return
            if fresh:
                meter.begin()  # what came before is compilation
            if seen % every["log"] == 0 or seen == total:  # where each call ends
                speed = meter.row(hosts.gather)
                row = {"step": seen, "tokens": tokens, **values, **speed}
                write(writers, row, path)

    def go_back() -> None:
        """Begin anew at the last checkpoint before the bad updates, past their rows."""
        nonlocal run, course, current, done, tokens, bad, writers, source, feeder
        saved.wait()
        back = hosts.from_primary(primary and manifest.newest_before(path, seen - bad))
        what = f"step {seen}: {bad} updates in a row were not finite, or spikes"
        if back is None or len(rewinds) >= config.guard.rewinds:
            raise RunError(
                f"{what}, after going back {len(rewinds)} times (at most guard.rewinds="
                f"{config.guard.rewinds}); the last good checkpoint is {back or 'none'}"
            )
        pending.clear()
        source.close()
        for writer in writers:
            writer.close()
        saved.drop_after(back)
        for leaf in jax.tree.leaves(current):  # there is no room for two states
            leaf.delete()
        current = saved.restore(back, wanted)
        there = manifest.read_meta(path / "checkpoints" / str(back))
        tokens = there["tokens"]
        tasks.learn(meta, there.get("task", {}))
        run = make_run(past=phases.skip_batches(run.phases, back, seen), at=back)
        course, done, bad = run.course, back, 0
        rewinds.append({"from": seen, "to": back})
        judge.cut(back)
        lived.update(judge.facts, phases=phases.to_plain(run.phases))
        if primary:
            workdir.amend_run(path, **lived)
        if clock:
            clock.cut(back)
        writers, source, feeder = begin()
        speak(f"{what}: back to step {back}, past the batches until then")

    def evaluate_all() -> bool:
        """Score every validation set and write the row; see whether it was the last.

        False when a signal, and then some seconds, broke it off.
        """
        nonlocal total
        scores = {}
        examples = config.eval.examples or None
        for name, function in valid.items():
            made = function.eval_batches(micro, examples, rows(micro))
            made = feed.to_devices(made, mesh, itertools.repeat(micro))
            made = feed.with_flag(made, mesh, lambda: stop.overdue)
            params = state.chosen(current, config.eval.ema)
            told: list[Any] = []
            values = step.run_eval(evaluate, params, made, is_late, told)
            if values is None:
                return False
            values |= function.score(told, examples) if told else {}
            if name == next(iter(valid)):
                tasks.learn(meta, values)
            scores |= {f"eval/{name}/{term}": v for term, v in values.items()}
        write(writers, {"step": done, "tokens": tokens, **scores}, path)
        if judge.metric:
            judge.see(done, hosts.from_primary(scores[judge.metric]))
            lived.update(judge.facts)
        if judge.over:
            speak(f"step {done}: the run ends (eval.patience): {judge.best}")
            total = done
        return True

    where = path / "profile" if primary else None  # all run the same program
    trace = Trace(where, done, **config.profile, say=speak)
    owed = bool(valid) and restored is not None and is_due("eval")
    owed = owed and not hosts.from_primary(primary and workdir.has_scores(path, done))
    speak(f"ready after {time.monotonic() - begun:.1f} s")
    stop.training = True
    # Without jit (JAX_DISABLE_JIT=1, to debug) every constant is a transfer.
    transfers = "allow" if jax.config.jax_disable_jit else "disallow"
    with jax.set_mesh(mesh), jax.transfer_guard(transfers), trace:
        if owed:  # an evaluation that a signal broke off
            asked = unscored = not evaluate_all()
        while done < total and not asked:
            count = calls.size(done)
            with trace.update(done, count, current):
                batch = meter.timed("waited", next, feeder)
                current, metrics = advance(current, batch)
            pending.append((done, count, metrics))
            done += count
            drain(keep=LAG)
            watch.tick(done, steady=done not in begins)
            if clock and clock.over:
                total = done
            asked = asked or (alone and bool(stop.number))
            at_eval = bool(valid) and is_due("eval")
            stops = at_eval or asked or is_due("checkpoint")
            if stops or bad >= config.guard.patience:
                drain(keep=0)
                watch.pause()
            if bad >= config.guard.patience:
                with jax.transfer_guard("allow"):
                    go_back()
            elif stops:
                paused = time.monotonic()
                # Rows first: a saved step implies that its rows are in the file.
                unscored = at_eval and not evaluate_all()
                asked = asked or unscored
                for writer in [*writers, *([clock] if clock else [])]:
                    writer.flush()
                if asked or is_due("checkpoint") or judge.step == done:
                    told = meta | lived | {"tokens": tokens}
                    keep = {judge.step}
                    if bad:  # a stretch of them may end in going back before it
                        saved.wait()
                        there = manifest.steps(path)
                        keep |= {*[n for n in there if n <= done - bad][-1:]}
                    saved.save(done, current, told, keep)
                meter.paused += time.monotonic() - paused
    saved.close()
    source.close()
    for writer in [*writers, *([clock] if clock else [])]:
        writer.close()
    if held is not None:
        held.close()
    if done < total or unscored:
        speak(f"stopped by a signal after step {done}, which is saved")
        return stop.status
    if primary and (clock or judge.metric):  # only now is it known
        workdir.amend_run(path, total_steps=done, **judge.facts)
    left = f", the last {bad} updates skipped" if bad else ""
    found = f"; {judge.best}" if judge.best else ""
    speak(f"done: step {done}{left}, {tokens:,} tokens, {path}{found}")
    return 0


if __name__ == "__main__":
    cli.command(main)
