# SPDX-License-Identifier: Apache-2.0
"""Processes that work for this one, and run only what they are given."""

import sys
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any


class Worker(SpawnProcess):
    """A process that does not begin by running its parent's script again.

    Spawned processes do that to get what the script defines: a script that calls
    bertjax.fit without `if __name__ == "__main__"` would call it again in each of them.
    """

    def start(self) -> None:
        main = vars(sys.modules["__main__"])
        kept: dict[str, Any] = {
            n: main[n] for n in ("__file__", "__spec__") if n in main
        }
        main.update(dict.fromkeys(kept))  # hides the script from the new process
        try:
            super().start()
        finally:
            main.update(kept)


class Context(SpawnContext):
    """The context from which a ProcessPoolExecutor creates its processes and locks."""

    Process = Worker
