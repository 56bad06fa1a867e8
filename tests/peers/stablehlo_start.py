# SPDX-License-Identifier: Apache-2.0
"""Time from the start of Python to the first answer of a StableHLO directory.

    taskset -c 0 python tests/peers/stablehlo_start.py DIR [ROUNDS]

Each round is a new process that reads the directory as launch/serve.py does and answers
a text of five tokens. Prints medians of CPU time and wall time, in seconds.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 5
LAUNCH = Path(__file__).parents[2] / "launch"
ASK = """
import sys, time
sys.path.append(sys.argv[2])
import numpy as np
from serve import load_stablehlo
card, run = load_stablehlo(sys.argv[1])
ids = np.array([[101, 2023, 2003, 103, 102]])
run(input_ids=ids, attention_mask=ids > 0, token_type_ids=0 * ids,
    mlm_positions=np.zeros((1, card.get("blanks", 1))))
print(time.process_time())
"""
spent, walls = [], []
for _ in range(ROUNDS):
    begin = time.perf_counter()
    command = [sys.executable, "-c", ASK, sys.argv[1], str(LAUNCH)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ}
    )
    walls.append(time.perf_counter() - begin)
    spent.append(float(done.stdout.split()[-1]))
print(f"CPU {statistics.median(spent):.2f} s, clock {statistics.median(walls):.2f} s")
