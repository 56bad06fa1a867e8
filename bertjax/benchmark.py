# SPDX-License-Identifier: Apache-2.0
"""Measure a config: python -m bertjax.benchmark --config=... --what=step|input|loop|...

step       one update on synthetic full rows; needs no data
input      the host's batch function, and masking alone; a made-up text if there is none
loop       bertjax.train itself, without checkpoints, against its own bare step
packing    one update on rows of data.train, padded and packed alternately
plan       planning `--sequences` sequences of made-up lengths
fill_mask  latency of one text of 32 and of 128 tokens, with random parameters

`--peer=FILE` measures against another program (measuring/alternate.py), whose
arguments stand behind it: `--peer='tests/peers/hf_mlm.py --compile'`.
"""

import functools
import json
import os
from collections.abc import Sequence

from absl import flags

from bertjax import UserError, registry
from bertjax.assembly import command_line, resolve, validate
from bertjax.config import cli
from bertjax.measuring.alternate import compare, serve, split
from bertjax.measuring.measurements import MEASURES
from bertjax.measuring.results import peak_rss_mb, steps_a_round, summarise


def define_flags(values: flags.FlagValues) -> None:
    string = functools.partial(flags.DEFINE_string, flag_values=values)
    integer = functools.partial(flags.DEFINE_integer, flag_values=values, lower_bound=1)
    boolean = functools.partial(flags.DEFINE_boolean, flag_values=values)
    string("what", "step", "step, input, loop, packing, plan or fill_mask; see above")
    string("peer", None, "another program to measure against")
    integer("rounds", 5, "times that each is measured")
    integer("sequences", 10**6, "plan: how many")
    boolean("json", False, "")
    boolean("serve", False, "answer a program that compares")


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(argv, define_flags)
    config = args.config
    validate.check(config)
    resolve.set_flags(config)
    make = registry.pick("--what", args.what, MEASURES)
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
        results = summarise(measured.facts, times, peak_rss_mb())
    if args.json:
        print(json.dumps(results))
    else:
        for key, value in results.items():
            text = f"{value:.6g}" if isinstance(value, float) else value
            print(f"{key:28} {text}")
    return 0


if __name__ == "__main__":
    cli.command(main)
