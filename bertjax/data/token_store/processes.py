# SPDX-License-Identifier: Apache-2.0
"""Processes that work for this one, and run nothing but what they are given."""

import sys
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any


class Worker(SpawnProcess):
    """A process that does not begin by running the script of its parent again.

    Spawned ones do, for what is defined in it: a script that calls bertjax.fit, and has
    no `if __name__ == "__main__"`, would do so in each of them.
    """

    def start(self) -> None:
        main = vars(sys.modules["__main__"])
        kept: dict[str, Any] = {
            n: main[n] for n in ("__file__", "__spec__") if n in main
        }
        main.update(dict.fromkeys(kept))  # nothing to begin with
        try:
            super().start()
        finally:
            main.update(kept)


class Context(SpawnContext):
    """What a ProcessPoolExecutor makes its processes and locks of."""

    Process = Worker
