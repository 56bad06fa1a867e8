# SPDX-License-Identifier: Apache-2.0
"""Compare the time and tokens of two runs at each held-out loss of the second run.

python tests/peers/quality.py WORKDIR/clock.jsonl LOG.jsonl

Seconds count from the start of the process, without the time of scoring. Between two
evaluations the loss is interpolated linearly.
"""

import json
import sys

import numpy as np


def read(path):
    """Return the columns of a log, by name; `loss` has the lowest loss so far."""
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    found = {key: np.array([r[key] for r in rows], float) for key in rows[0]}
    found["loss"] = np.minimum.accumulate(found["loss"])
    found["seconds"] -= found["evaluating"]
    return found


def at(log, loss, key):
    """Return a column's value when the loss was reached; NaN if it never was."""
    if loss < log["loss"][-1]:
        return np.nan
    return np.interp(-loss, -log["loss"], log[key])


ours, peer = map(read, sys.argv[1:])
print("loss   seconds ours : peer = ratio    tokens ours : peer    CPU s ours : peer")
for loss in peer["loss"]:
    a, b = (
        [at(log, loss, key) for key in ("seconds", "tokens", "cpu_seconds")]
        for log in (ours, peer)
    )
    print(
        f"{loss:.4f} {a[0]:8.0f} : {b[0]:.0f} = {a[0] / b[0]:.3f}"
        f"   {a[1] / 1e6:8.3f} M : {b[1] / 1e6:.3f} M   {a[2]:8.0f} : {b[2]:.0f}"
    )
