# SPDX-License-Identifier: Apache-2.0
"""Pretrain or finetune a model: python -m bertjax.train --config=... --workdir=...

Repeat the command to resume: the run ends with bit-identical parameters.
"""

import contextlib
import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError, __version__, registry
from bertjax.assembly import (
    command_line,
    init_from,
    prepared_text,
    resolve,
    validate,
    workdirs,
)
from bertjax.checkpoints import manifest, workdir
from bertjax.config import cli, serialize
from bertjax.config.flag_help import Flag, shared
from bertjax.parallel.host_memory import keep_freed_memory
from bertjax.parallel.watch import Watch
from bertjax.storage import directories
from bertjax.training.signals import StopSignal

FLAGS = {
    **shared("workdir"),
    "multihost": Flag("this is one of several processes of a run, one per host", False),
    "dry_run": Flag("build everything, print it and exit", False),
    "allow_config_change": Flag(
        "resume even though the workdir's config differs", False
    ),
}

# Config keys that name files. Paths may differ between hosts; the hashes of what all
# hosts read from them are compared.
FILES = re.compile(
    r"init_from|teacher|task\.index|data\.(train|valid|cache|vocab|entities|similar"
    r"|mask_weights|swap|segmenter|concept|control)"
)


def main(argv: Sequence[str]) -> int:
    stop = StopSignal()
    stop.install()
    args = command_line.parse(argv, FLAGS, __doc__)
    if not args.workdir and not args.dry_run:
        raise UserError("--workdir is missing: the directory of the run")
    with Watch(args.config.hosts.timeout) as watch:
        stop.leave = watch.leave
        given = {name: args[name].value for name in FLAGS}
        given |= {"overrides": json.loads(args.overrides), "stop": stop, "watch": watch}
        return train(args.config, given.pop("workdir"), **given)


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
    """Train to the end of the config from the newest checkpoint in `directory`, if any.

    Returns the exit status: 0 when done, 143 or 130 after a signal. Raises UserError,
    and RunError when a loss is not finite or no checkpoint is intact.
    """
    stop, watch = stop or StopSignal(), watch or Watch(config.hosts.timeout)
    begun, primary = time.monotonic(), True
    path = None if dry_run else manifest.as_path(directory)
    # Refuse invalid configs before importing jax, which is slow.
    validate.check(config)
    resumes = bool(path and manifest.steps(path))
    # A resumed run does not need init_from any more, unless its vocabulary is there.
    if config.init_from and not (resumes and config.data.vocab):
        lost = workdirs.explain_lost_source(path, config) if resumes else ""
        if lost:
            raise UserError(lost)
        init_from.check_init_from(config.init_from)
    if config.teacher and not (resumes and config.data.vocab):
        init_from.check_init_from(config.teacher, key="teacher")
    if resumes:
        init_from.keep_vocabulary(config, path)
    prepared_text.check_inputs(config)
    if path is not None:
        workdirs.check_workdir(path, config, allow_config_change)
    resolve.set_flags(config)
    if multihost:
        from bertjax.parallel import hosts

        watch.start(*hosts.initialize(watch.limit, watch.heartbeats))
        primary = hosts.is_primary()
        # This first exchange comes before host 0 verifies a checkpoint, because
        # verifying takes longer than some networks wait for the first message.
        hosts.check_settings(shared_settings(config))
    restored, finished, same_text = None, False, False
    with contextlib.ExitStack() as stack:
        if primary and path is not None:
            # Keep other processes of this machine out of the workdir.
            stack.enter_context(directories.lock(path))
            restored = manifest.newest_intact(path, cli.say)
            scored = bool(config.data.valid)
            finished = workdir.is_done(path, restored, scored, allow_config_change)
            # If so, the run is known to be finished without preparing the text.
            same_text = finished and workdirs.reads_same_text(path, config)
        if multihost:
            stands = restored, finished, same_text
            restored, finished, same_text = hosts.from_primary(stands)
        log = cli.say if primary else lambda text: None
        if finished and same_text:
            log(f"{path} is done: step {restored}")
            return 0
        return _train(
            config, path, restored, finished, overrides, stop, watch, begun, log
        )


def shared_settings(config: ConfigDict) -> dict[str, Any]:
    """Return the settings that all hosts of a run must agree on.

    These are the version of the code and the config without the keys that name files,
    whose paths may differ between hosts.
    """
    flat = serialize.flatten(config)
    same = {key: x for key, x in flat.items() if not FILES.fullmatch(key)}
    return {**same, "bertjax": __version__}


def _train(
    config: ConfigDict,
    path: Any,
    restored: int | None,
    finished: bool,
    overrides: dict[str, Any] | None,
    stop: StopSignal,
    watch: Watch,
    begun: float,
    log: Callable[[str], None],
) -> int:
    """Train from step `restored`, or only describe the run if `path` is None."""
    import jax

    from bertjax.assembly import training_run
    from bertjax.assembly.open_teacher import open_teacher
    from bertjax.assembly.train_loop import TrainLoop
    from bertjax.parallel.mesh import make_mesh

    mesh = make_mesh(**config.mesh)
    teacher = None if finished else open_teacher(config, log)
    if not finished:
        training_run.check_before_text(config, mesh, teacher)
    prepared, hashes = training_run.prepare(config, log)
    meta = {}
    if restored is not None:
        meta = manifest.read_meta(path / "checkpoints" / str(restored))
        others = prepared_text.other_files(meta["config"], config)
        workdir.check_text(path, meta["stores"], hashes, others)
    if finished:
        new = ", ".join(sorted(hashes.keys() - meta["stores"].keys()))
        left = f"; data.valid: {new}: not scored, bertjax.evaluate does" * bool(new)
        log(f"{path} is done: step {restored}{left}")
        return 0
    run = training_run.TrainingRun(
        config, path, mesh, (prepared, hashes), restored, meta, log, teacher
    )
    run.describe(log)
    outside = map(registry.is_outside, (config.optim.name, config.optim.schedule))
    if path is None or any(outside):  # the shipped ones are known to fit
        run.trace_update()
    if path is None:
        run.read_init_from(log, reads=False)
        from bertjax.reporting.batch_preview import dry_run_lines

        print("\n".join(dry_run_lines(run)))
        return 0
    loop = TrainLoop(run, stop, watch, overrides, log)
    loop.log(f"ready after {time.monotonic() - begun:.1f} s")
    with jax.set_mesh(mesh):
        loop.train()
    return loop.finish()


if __name__ == "__main__":
    keep_freed_memory()
    cli.command(main)
