# SPDX-License-Identifier: Apache-2.0
"""Train the best small encoder in a fixed time: python -m bertjax.speedrun

  --track=cpu3h     the recipe, device and time: cpu20m, cpu3h, h200-25min, v5e8
  --data=DIR        the folder with the source files of the text, ten million words;
                    docs/speedrun.md says where they come from
  --workdir=DIR     the runs are DIR/seed-0, ..., the results DIR/speedrun.json
  --seeds=3         the number of runs, which differ in their seed
  --against=DIR     compare with an entry's runs (Welch's t test)
  [--config=FILE] [--config.KEY=VALUE ...]   another recipe than the track's own

The track fixes text, tokenizer, held-out rows with their masks, minimal pairs and time;
you choose everything else. If the track's device is not available, the command prints
the runs' commands instead. Repeat the command to resume.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertjax import UserError, evaluate, registry, train
from bertjax.assembly import command_line, resolve, validate
from bertjax.checkpoints import manifest, workdir
from bertjax.config import cli
from bertjax.config.arguments import split_arguments
from bertjax.config.flag_help import Flag, shared
from bertjax.models.families import in_effect
from bertjax.parallel.host_memory import keep_freed_memory
from bertjax.scoring import sequence_scorers
from bertjax.scoring.scorer import load_scorer
from bertjax.speedruns import corpus, records
from bertjax.speedruns.tracks import (
    TRACKS,
    Track,
    check_devices,
    check_overrides,
    check_recipe,
)
from bertjax.speedruns.tracks import rules as rules_of
from bertjax.storage import atomic
from bertjax.storage.paths import expand
from bertjax.training.signals import StopSignal

FLAGS = {
    "track": Flag("cpu20m, cpu3h, h200-25min or v5e8; see above"),
    "data": Flag("folder with the text files (docs/speedrun.md)"),
    **shared("workdir"),
    "seeds": Flag("number of runs; the first has the config's seed", 1, least=1),
    "against": Flag("workdir of other runs of the track, to compare with"),
    "scorer": Flag("how minimal pairs are scored, as in bertjax.evaluate"),
    **shared("json"),
}


def main(argv: Sequence[str]) -> int:
    stop = StopSignal()
    stop.install()
    given, own = split_arguments(argv)
    args = command_line.parse(own, FLAGS, __doc__, needs_config=False)
    for name in ("track", "data", "workdir"):
        if not getattr(args, name):
            raise UserError(f"--{name} is missing: {FLAGS[name].help}")
    track = registry.pick("--track", args.track, TRACKS)
    path = manifest.local_workdir(args.workdir)
    theirs = None
    if args.against:
        entry = manifest.local_workdir(args.against, "--against")
        theirs = records.read_records(entry, "--against", args.track)
        records.check_seeds(args.seeds, len(theirs))
    first = command_line.parse(with_recipe(track, given))
    check_overrides(args.track, json.loads(first.overrides))
    text = corpus.place(expand(first.config.data.cache, "data.cache"))
    seeds = range(first.config.seed, first.config.seed + args.seeds)
    runs = {
        seed: [*with_recipe(track, given, text), f"--config.seed={seed}"]
        for seed in seeds
    }
    for arguments in runs.values():
        config = command_line.parse(arguments).config
        check_recipe(args.track, config)
        validate.check(config)
    scorer = check_scored(config, args.scorer)
    resolve.set_flags(config)  # before the devices are checked
    if wrong := check_devices(args.track, track):
        for seed, arguments in runs.items():
            print(shlex.join(command(arguments, path, seed)))
        lines = "line above is" if len(runs) == 1 else "lines above are"
        raise UserError(f"{wrong}: the {lines} what it would run")
    corpus.make_corpus(expand(args.data, "--data"), text, cli.say)
    found = []
    for seed, arguments in runs.items():
        run = path / f"seed-{seed}"
        parsed = command_line.parse(arguments)
        overrides = json.loads(parsed.overrides)
        status = train.train(parsed.config, str(run), overrides=overrides, stop=stop)
        # the rest has nothing to save, so a signal ends it at once
        stop.training = False
        if status or stop.number:
            return status or stop.status
        found.append(score(run, seed, track, text, scorer))
    return report(args, track, path, found, theirs)


def check_scored(config: Any, scorer: str | None) -> str:
    """Refuse a run that the rules could not score, and return the scorer of the pairs.

    The default scorer is the objective's. Raises UserError.
    """
    learnt = resolve.trained_objectives(config)
    is_decoder = bool(in_effect(config.model.to_dict()).get("is_decoder"))
    able = sequence_scorers.find_scorers(is_decoder, learnt)
    if not sequence_scorers.fills_masks(able):
        raise UserError(
            f"objective={config.objective} fills no masks, and the held-out loss of a "
            "speedrun is for masked tokens: give masked rows a share "
            "(--config.objective='mntp*1+clm*15'), or a phase "
            "(--config.phases='percent=50 objective=clm; objective=mlm')"
        )
    how = is_decoder, learnt, "--scorer", "the recipe"
    return sequence_scorers.pick_scorer(scorer, *how)


def with_recipe(
    track: Track, given: Sequence[str], text: Path | None = None
) -> list[str]:
    """Return the arguments of a run.

    They are the track's recipe and its length unless others are given, then the given
    ones, then those that the rules fix, if the text is known.
    """
    own = any(word.startswith(("--config=", "-config=")) for word in given)
    arguments = [] if own else [f"--config={track.config}"]
    arguments += [] if own else [f"--config.{flag}" for flag in track.flags]
    ruled = rules_of(track, text) if text else {}
    return [*arguments, *given, *(f"--config.{k}={v}" for k, v in ruled.items())]


def command(arguments: Sequence[str], path: Path, seed: int) -> list[str]:
    """Return the command line of a run."""
    run = f"--workdir={path / f'seed-{seed}'}"
    return ["python", "-m", "bertjax.train", *arguments, run]


def score(
    run: Path, seed: int, track: Track, text: Path, scorer: str
) -> dict[str, Any]:
    """Return the record of a finished run; it is computed once per scorer."""
    file = run / records.FILE
    found = {"seed": seed} | records.measure(run, track)
    known = workdir.read_json(file)
    if records.is_record(known) and {**known, **found, "scorer": scorer} == known:
        return known
    flags = [f"--rates={track.rate}", f"--length={track.length}"]
    masked = evaluate_run(run, "mlm", f"--text={text / 'valid.txt'}", *flags)
    masked = masked["rates"][track.rate]
    found |= {"loss": masked["mlm_loss"], "right": masked["mlm_accuracy"]}
    flags = [f"--text={text / 'pairs.jsonl.gz'}", f"--scorer={scorer}"]
    pairs = evaluate_run(run, "pairs", *flags)
    found |= {"pairs": pairs["accuracy"], "scorer": pairs["scorer"]}
    found["by_paradigm"] = {k: v["accuracy"] for k, v in pairs["by_paradigm"].items()}
    atomic.write_file(file, json.dumps(found, indent=1) + "\n", str(file))
    return found


def evaluate_run(run: Path, what: str, *flags: str) -> dict[str, Any]:
    """Return the result of bertjax.evaluate for a run."""
    argv = [f"--workdir={run}", f"--what={what}", *flags]
    args = command_line.parse(argv, evaluate.FLAGS, needs_config=False)
    return dict(load_scorer(what).score(args, str(run), "--workdir").objects[0])


def report(
    args: Any,
    track: Track,
    path: Path,
    found: Sequence[records.Record],
    theirs: Sequence[records.Record] | None,
) -> int:
    """Print times and scores of the runs; raise UserError if they took too long."""
    summary = records.summarize(found, track)
    if theirs:
        summary["against"] = records.compare(found, theirs)
    entry = {"track": args.track, "records": found, "summary": summary}
    text = json.dumps(entry, indent=1) + "\n"
    atomic.write_file(path / records.FILE, text, f"--workdir={path}")
    if args.json:
        print(json.dumps({"track": args.track} | summary))
    else:
        print("\n".join(records.describe(args.track, track, summary)))
        for name, one in summary.get("against", {}).items():
            p = f", p = {one['p']:.2g}" if one.get("p") is not None else ""
            print(f"  {name}: {one['difference']:+.4f} against it{p}")
    if not summary["in_time"]:
        raise UserError(
            f"the runs took {summary['minutes']['mean']:.1f} minutes, and "
            f"--track={args.track} has {track.budget}: no entry; give fewer steps"
        )
    return 0


if __name__ == "__main__":
    keep_freed_memory()
    cli.command(main)
