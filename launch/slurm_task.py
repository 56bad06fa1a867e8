# SPDX-License-Identifier: Apache-2.0
"""Run one task of a Slurm job and record its exit status, for launch/slurm.sh.

    python launch/slurm_task.py FOLDER COMMAND ...

srun's own status for all tasks may be 143, as if all were saved, when a task was only
stopped by a failure elsewhere (seen with Slurm 22.05). So FOLDER/<task> gets the status
and the number of tasks. Slurm may signal this process alone, so it passes signals on.
"""

import os
import signal
import subprocess
import sys


def main() -> int:
    folder, *command = sys.argv[1:]
    early: list[int] = []
    child: subprocess.Popen | None = None

    def hand_on(number: int, frame: object) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)  # does nothing if it has ended

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    child = subprocess.Popen(command)
    for number in early:
        child.send_signal(number)
    code = child.wait()
    code = 128 - code if code < 0 else code
    task = os.environ["SLURM_PROCID"]
    draft = f"{folder}/.{task}"
    try:
        with open(draft, "w") as file:
            file.write(f"{code} {os.environ['SLURM_NTASKS']}\n")
        os.replace(draft, f"{folder}/{task}")
    except OSError as e:
        print(f"{folder} cannot be written: {e}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    # Python would restore the signals' default handlers before it ends.
    os._exit(main())
