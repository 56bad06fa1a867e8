# SPDX-License-Identifier: Apache-2.0
"""Pretrain a masked language model: python -m bertjax.train --config=... --workdir=...

Repeat the command to resume: the run ends with the same parameters, bit for bit.
"""

import functools
import itertools
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from absl import flags
from ml_collections.config_dict import ConfigDict

from bertjax import RunError, UserError, __version__, build, checks, disk
from bertjax import config as c
from bertjax.data import phases
from bertjax.parallel.watch import Watch
from bertjax.training import manifest, workdir
from bertjax.training.signals import StopSignal

LAG = 1  # steps in flight while the host looks at the one before


def define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    flags.DEFINE_boolean("multihost", False, "", flag_values=values)
    flags.DEFINE_boolean("dry_run", False, "", flag_values=values)
    flags.DEFINE_boolean("allow_config_change", False, "", flag_values=values)


def main(argv: Sequence[str]) -> int:
    stop = StopSignal()
    stop.install()
    args = c.parse(argv, define_flags)
    if not args.workdir and not args.dry_run:
        raise UserError("--workdir is missing: the directory the run lives in")
    with Watch(args.config.hosts.timeout) as watch:
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
    checks.check(config)
    build.check_inputs(config)
    path = None if dry_run else manifest.as_path(directory)
    if config.init_from and not (path and manifest.steps(path)):
        disk.check_init_from(config.init_from)
    if path is not None:
        disk.check_workdir(path, config, allow_config_change)

    def finished(path: Any, restored: int | None) -> bool:
        # With a changed config a longer total may follow.
        return not allow_config_change and workdir.is_done(
            path, restored, scored=bool(config.data.valid)
        )

    restored = held = None
    if path is not None and not multihost:
        held = workdir.lock(path)
        restored = manifest.newest_intact(path, c.say)
        if finished(path, restored):
            c.say(f"{path} is done: step {restored}")
            return 0
    if config.deterministic:
        chosen = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{chosen} --xla_gpu_deterministic_ops=true"

    # ------------------------------------------------------------ 2. the processes
    import jax

    from bertjax.models.config import flops_per_token
    from bertjax.models.encoder import count_params
    from bertjax.objectives.base import make_objective
    from bertjax.parallel import feed, hosts
    from bertjax.parallel.mesh import make_mesh, peak_flops

    if multihost:
        watch.start(*hosts.initialize(config.hosts.timeout))
        stop.install()  # initialising replaced the handler of SIGTERM
        if hosts.is_primary() and path is not None:
            held = workdir.lock(path)
            restored = manifest.newest_intact(path, c.say)
        restored = hosts.from_primary(restored)
        if hosts.from_primary(finished(path, restored)):
            if hosts.is_primary():
                c.say(f"{path} is done: step {restored}")
            return 0
    primary = hosts.is_primary()
    speak = c.say if primary else lambda text: None
    mesh = make_mesh(**config.mesh)
    for size in {config.batch_size, *(p.batch_size for p in c.wanted_phases(config))}:
        feed.check_batch_size(mesh, size, config.accumulate)
    # Of a model with one piece: what can be refused before the text is read.
    objective, _ = make_objective(config.objective, c.encoder_config(config, 1))
    c.check_plan(config, objective.needs)
    build.make_tx(config, 0, 1)

    # ------------------------------------------------------------ 3. the data
    if primary:
        prepared = build.prepare(config, speak)
    hosts.barrier("prepared")
    if not primary:  # finds it on a shared disk, makes its own elsewhere
        prepared = build.prepare(config, speak)
    parts = prepared.parts
    stores = {
        name if name == "train" else f"train/{name}": store
        for name, store in parts.items()
    }
    stores |= prepared.valid
    hashes = {name: store.content_hash for name, store in stores.items()}
    hashes |= build.file_hashes(config)
    hosts.check_equal("the prepared text", [*hashes.values()])
    said = {}
    if path is not None and restored is not None:
        said = manifest.read_meta(path / "checkpoints" / str(restored))
        workdir.check_text(path, said["stores"], hashes)
    tokenizer = prepared.tokenizer
    cfg = c.encoder_config(config, tokenizer.vocab_size, jax.default_backend())
    objective, cfg = make_objective(config.objective, cfg)
    counts = build.count_tokens(parts)
    tables = build.make_tables(config, tokenizer, counts, speak)
    run = build.make_run(
        config,
        objective.needs,
        tokenizer,
        parts,
        tables,
        past=phases.from_plain(said.get("phases", [])),
        at=restored or 0,
        say=speak,
    )
    course, total = run.course, run.total
    valid = [
        build.make_eval_batches(
            config, objective.needs, tokenizer, name, store, tables, speak
        )
        for name, store in prepared.valid.items()
    ]
    if (restored or 0) > total:
        raise UserError(f"total is {total} steps, and {path} is at step {restored}")
    now = run.phases[0]
    every = {
        name: max(1, c.steps(config, f"{name}.every", now, total))
        for name in ("log", "eval", "checkpoint")
    }

    # ------------------------------------------------------------ 4. shapes and step
    from bertjax.training import dispatch, state, step
    from bertjax.training.checkpoint import Checkpoints, merge, warm_start

    begins = *(s.start for s in course.stages), restored or 0  # what is compiled anew
    most = config.steps_per_call
    calls = dispatch.Calls(most, total, (*every.values(),), begins)
    calls.check()
    warmup, decay = (
        phases.steps_within(*c.unit_of(config, f"optim.{name}"), run.phases, total, end)
        for name, end in (("warmup", False), ("decay", True))
    )
    update = build.make_update(config, objective, mesh, warmup, total, decay)
    shapes, shardings = update.shapes, update.shardings
    evaluate = jax.jit(step.make_eval_step(objective.sums))
    rows = functools.cache(functools.partial(feed.local_rows, mesh))
    micro = config.batch_size // config.accumulate  # what fits in memory at once
    parameters = count_params(shapes.params)
    speak(f"{parameters:,} parameters; {total:,} steps; mesh {dict(mesh.shape)}")
    for stage in course.stages:
        predicted = f", {stage.masking.rate:.0%} predicted" if stage.P else ""
        speak(
            f"from step {stage.start:,}: {stage.batch_size:,} of {stage.n:,} rows of "
            f"{stage.length} tokens{predicted}"
        )
    if dry_run:
        from bertjax.show import describe

        describe(shapes.params, shardings.params, course.batch(0), tokenizer)
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
        current = state.born(update.init, update.tx, mesh, shardings)
        if config.init_from:
            source = disk.check_init_from(config.init_from)
            disk.check_init_tokenizer(source, tokenizer)
            taken = warm_start(source, wanted.params, speak)
            current = current._replace(params=merge(current.params, taken))
    facts = {"stores": hashes, "total_steps": total}
    facts |= {"phases": phases.to_plain(run.phases)}
    facts |= {"parameters": parameters, "mesh": dict(mesh.shape)}
    facts |= {"devices": mesh.devices.size, "processes": jax.process_count()}
    facts["device_kind"] = mesh.devices.flat[0].device_kind
    if primary:  # only now: a refused command leaves the workdir as it was
        workdir.begin(
            path,
            {"config.json": c.to_json(config), "overrides.json": json.dumps(overrides)},
            facts,
            tokenizer.save,
            counts,
        )
    hosts.barrier("workdir")

    # ------------------------------------------------------------ 6. the loop
    from bertjax.data.stream import stream
    from bertjax.training.meter import Meter
    from bertjax.training.trace import Trace
    from bertjax.training.writer import ProgressWriter, make_writers

    writers: list[Any] = []
    if primary:
        progress = ProgressWriter(total, done)
        writers = [*make_writers(config.log.writers, path, done), progress]
        speak = progress.say
    meta = {
        "config": config.to_dict(),
        "tokenizer": tokenizer.identity,
        "stores": hashes,
        "phases": phases.to_plain(run.phases),
        "version": __version__,
    }
    source = stream(lambda i: course.batch(i, rows), done, total, config.data.engine)
    meter = Meter(peak_flops(mesh))
    costs = {}  # of a step of each phase: its slots, and forward and backward FLOPs
    for stage in course.stages:
        slots = stage.batch_size * stage.length
        costs[stage] = slots, slots * flops_per_token(cfg, stage.length, stage.P)
    pending: deque[tuple[int, int, dict[str, jax.Array]]] = deque()
    asked = unscored = False

    def write(row: dict[str, Any]) -> None:
        try:
            for writer in writers:
                writer.write(row)
        except OSError as e:
            raise UserError(f"--workdir={path} cannot be written: {e}") from e

    # A signal may reach one process of many: it travels with the batches, so that all
    # learn of it at the same step. A single process need not wait for that.
    alone = jax.process_count() == 1

    def asked_alone() -> bool:
        return alone and bool(stop.number)

    def late_alone() -> bool:
        return alone and stop.overdue

    def with_flag(
        batches: Iterable[dict[str, Any]], raised: Callable[[], bool]
    ) -> Iterator[dict[str, Any]]:
        for batch in batches:
            if not alone:
                batch["stop"] = feed.flag(mesh, raised())
            yield batch

    def is_due(name: str) -> bool:
        return done == total or done % every[name] == 0

    sizes = (course.at(i).batch_size for i in range(done, total))
    feeder, advance = feed.to_devices(source, mesh, sizes), update.step
    if most > 1:
        feeder = dispatch.to_devices(source, mesh, sizes, calls.sizes(done), most)
        advance = update.many
    feeder = with_flag(feeder, lambda: bool(stop.number))

    def drain(keep: int) -> None:
        """Look at steps that have run: count, refuse what is not finite, write rows."""
        nonlocal tokens, asked
        while len(pending) > keep:
            at, count, metrics = pending.popleft()
            fresh = at in begins
            metrics = meter.timed("blocked", jax.device_get, metrics)
            for values in dispatch.rows(metrics, count):
                at += 1
                asked = values.pop("stop", 0) > 0 or asked  # popped: it is no metric
                real = values.pop("tokens")
                tokens += real
                meter.count(real, *costs[course.at(at - 1)])
                if wrong := step.non_finite(values):
                    saved.close()
                    raise RunError(
                        f"step {at}: {', '.join(wrong)} not finite; the last good "
                        f"checkpoint is {(manifest.steps(path) or ['none'])[-1]}"
                    )
            if fresh:
                meter.begin()  # what came before is compilation
            if at % every["log"] == 0 or at == total:  # where each call ends
                speed = meter.row(hosts.gather)
                write({"step": at, "tokens": tokens, **values, **speed})

    def evaluate_all() -> bool:
        """Score every validation set and write the row.

        False when a signal, and then some seconds, broke it off.
        """
        scores = {}
        for name, function in zip(prepared.valid, valid, strict=True):
            made = function.eval_batches(
                micro,
                examples=config.eval.examples or None,
                rows=feed.local_rows(mesh, micro),
            )
            made = feed.to_devices(made, mesh, itertools.repeat(micro))
            made = with_flag(made, lambda: stop.overdue)
            values = step.run_eval(evaluate, current.params, made, late_alone)
            if values is None:
                return False
            scores |= {f"eval/{name}/{term}": v for term, v in values.items()}
        write({"step": done, "tokens": tokens, **scores})
        return True

    where = path / "profile" if primary else None  # all run the same program
    trace = Trace(where, done, **config.profile, say=speak)
    owed = bool(valid) and restored is not None and is_due("eval")
    owed = owed and not hosts.from_primary(primary and workdir.has_scores(path, done))
    speak(f"ready after {time.monotonic() - begun:.1f} s")
    stop.training = True
    # Without jit (JAX_DISABLE_JIT=1, to debug) every constant is a transfer.
    guard = "allow" if jax.config.jax_disable_jit else "disallow"
    with jax.set_mesh(mesh), jax.transfer_guard(guard), trace:
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
            asked = asked or asked_alone()
            at_eval = bool(valid) and is_due("eval")
            if at_eval or asked or is_due("checkpoint"):
                watch.pause()
                drain(keep=0)
                paused = time.monotonic()
                # Rows first: a saved step implies that its rows are in the file.
                unscored = at_eval and not evaluate_all()
                asked = asked or unscored
                for writer in writers:
                    writer.flush()
                if asked or is_due("checkpoint"):
                    saved.save(done, current, meta | {"tokens": tokens})
                meter.paused += time.monotonic() - paused
    saved.close()
    source.close()
    for writer in writers:
        writer.close()
    if held is not None:
        held.close()
    if done < total or unscored:
        speak(f"stopped by a signal after step {done}, which is saved")
        return stop.status
    speak(f"done: step {done}, {tokens:,} tokens, {path}")
    return 0


if __name__ == "__main__":
    c.command(main)
