# SPDX-License-Identifier: Apache-2.0
"""Measure a config: python -m bertjax.benchmark --config=... --what=step|input|loop|...

step       one update on synthetic full rows; needs no data
input      the host's batch function, and masking alone; on made-up text by default
loop       bertjax.train itself, without checkpoints, against its own bare step
packing    one update on rows of data.train, padded and packed alternately
plan       planning `--sequences` sequences of made-up lengths
fill_mask  latency of one text of 32 and of 128 tokens, with random parameters
generate   batch_size prompts of half of data.length, continued greedily to its end

`--peer=FILE` measures against another program (measuring/alternate.py); its arguments
follow the file's name: `--peer='tests/peers/hf_mlm.py --compile'`.
"""

import functools
import json
import os
from collections.abc import Sequence

from bertjax import UserError, registry
from bertjax.assembly import command_line, prepared_text, resolve, validate
from bertjax.config import cli
from bertjax.config.flag_help import Flag, shared
from bertjax.measuring.alternate import compare, serve, split
from bertjax.measuring.measurements import MEASURES
from bertjax.measuring.results import peak_rss_mb, steps_a_round, summarize
from bertjax.parallel.host_memory import keep_freed_memory

FLAGS = {
    "what": Flag(
        "what to measure: step, input, loop, packing, plan, fill_mask or generate",
        "step",
    ),
    "peer": Flag("another program to compare with"),
    "rounds": Flag("number of measurements of each program", 5, least=1),
    "sequences": Flag("with --what=plan: number of sequences", 10**6, least=1),
    **shared("json"),
    "serve": Flag("measure on request of another benchmark process", False),
}


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, FLAGS, __doc__)
    config = args.config
    validate.check(config)
    prepared_text.check_concepts(config)
    resolve.set_flags(config)
    make = registry.pick("--what", args.what, MEASURES)
    if args["sequences"].present and args.what != "plan":
        raise UserError(f"--sequences needs --what=plan, and this is {args.what}")
    if args.what == "plan":
        make = functools.partial(make, sequences=args.sequences)
    if args.what == "loop" and not config.data.train:
        config.data.train = "builtin:docs"
    if args.serve:
        serve(make(config))
        return 0
    if args.peer or args.what == "loop":
        if args.peer and not os.path.isfile(split(args.peer)[0]):
            raise UserError(f"--peer={args.peer}: no such file")
        results = compare(argv, config, args.what, args.peer, args.rounds)
    else:
        measured = make(config)
        steps = steps_a_round(measured.run(1))
        times = [measured.run(steps) for _ in range(args.rounds)]
        results = summarize(measured.facts, times, peak_rss_mb())
    if args.json:
        print(json.dumps(results))
    else:
        for key, value in results.items():
            text = f"{value:.6g}" if isinstance(value, float) else value
            print(f"{key:28} {text}")
    return 0


if __name__ == "__main__":
    keep_freed_memory()
    cli.command(main)
