# SPDX-License-Identifier: Apache-2.0
import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from bertjax.parallel.host_memory import keep_freed_memory
import numpy as np
kept = keep_freed_memory() if sys.argv[1] == "keep" else False
def touch():
    return np.ones(2**21)  # 16 MB, 4,096 pages
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    touch()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(word, **variables):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC", "GLIBC"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, word],
        env=env | {"JAX_PLATFORMS": "cpu"} | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_freed_memory_is_not_cleared_again():
    kept, faults = run("keep")
    assert kept
    assert faults < 1_000
    assert run("leave")[1] > 5 * max(faults, 100)


def test_what_the_user_chose_stands():
    assert not run("keep", MALLOC_ARENA_MAX="2")[0]
