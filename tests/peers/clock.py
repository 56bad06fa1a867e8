# SPDX-License-Identifier: Apache-2.0
"""The clock that both sides of a comparison of runs use: the time of the process.

In a run of bertjax: PYTHONPATH=tests/peers ... --config.log.writers=jsonl,clock.Clock
"""

import json
import os
import time


def process_seconds() -> float:
    """Return the seconds since this process was started, imports included."""
    with open("/proc/self/stat") as file:
        begun = int(file.read().rpartition(")")[2].split()[19])
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    return now - begun / os.sysconf("SC_CLK_TCK")


class Clock:
    """A writer of WORKDIR/clock.jsonl: held-out losses with wall and CPU seconds.

    `evaluating` is the part of the wall seconds spent on scoring: the time between a
    step's row of training and its row of evaluation, so log.every must divide
    eval.every.
    """

    def __init__(self, workdir, step):
        self.file = open(workdir / "clock.jsonl", "a")  # noqa: SIM115
        self.evaluating = self.at = 0.0

    def write(self, row):
        now = process_seconds()
        losses = [v for k, v in row.items() if k.endswith("/mlm_loss")]
        if row.keys() & {"train/loss"}:
            self.at = now
            return
        self.evaluating += now - self.at
        row = {
            "step": row["step"],
            "tokens": row["tokens"],
            "loss": losses[0],
            "seconds": now,
            "evaluating": self.evaluating,
            "cpu_seconds": time.process_time(),
        }
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def flush(self):
        pass

    def close(self):
        self.file.close()
