# SPDX-License-Identifier: Apache-2.0
"""Run commands in forks of this process, which has imported the libraries already.

Each line of standard input is {"name", "arguments", "env", "stdout", "stderr"}; a fork
runs `python -m bertjax.NAME ARGUMENTS`, and the server prints a line with its exit
status. The server forks before jax starts a backend and its threads. Variables in `env`
that a library reads at import, as jax does, have no effect. The package's subpackages
are imported as well, but not the command modules: a fork runs them from their files.
"""

import importlib
import json
import os
import pkgutil
import runpy
import signal
import sys
import threading

import flax.linen
import jax
import optax
import orbax.checkpoint

LIMIT_SECONDS = 900
LIBRARIES = (flax.linen, jax, optax, orbax.checkpoint)


def import_rooms() -> None:
    """Import the modules of bertjax's subpackages."""
    package = importlib.import_module("bertjax")
    for module in pkgutil.walk_packages(package.__path__, "bertjax."):
        if module.name.count(".") > 1:
            importlib.import_module(module.name)


def become(
    name: str, arguments: list[str], env: dict[str, str], stdout: str, stderr: str
) -> None:
    """Run a command in this process, its output redirected to files."""
    for path, number in ((os.devnull, 0), (stdout, 1), (stderr, 2)):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
    # The buffer of the old sys.stdin has the orders that follow.
    sys.stdin = open(0)  # noqa: SIM115
    sys.argv = [name, *arguments]
    os.environ.update(env)
    sys.path[0] = os.getcwd()  # as under `python -m`; it was this file's folder
    sys.path[1:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    runpy.run_module(f"bertjax.{name}", run_name="__main__", alter_sys=True)


def wait(pid: int) -> int:
    """Wait for a process, LIMIT_SECONDS at most; return its status, as subprocess."""
    timer = threading.Timer(LIMIT_SECONDS, os.kill, (pid, signal.SIGKILL))
    timer.start()
    _, status = os.waitpid(pid, 0)
    timer.cancel()
    timer.join()
    return os.waitstatus_to_exitcode(status)


def serve() -> dict | None:
    """Fork for each order. A fork returns its order; the server returns None at the end
    of its input."""
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            return json.loads(line)
        print(wait(pid), flush=True)
    return None


if __name__ == "__main__":
    import_rooms()
    print("ready", flush=True)
    if order := serve():
        become(**order)
