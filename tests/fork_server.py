# SPDX-License-Identifier: Apache-2.0
"""Run commands as processes of their own that need not import the libraries again.

Each line of standard input is {"name", "arguments", "env", "stdout", "stderr"}; a fork
runs `python -m bertjax.NAME ARGUMENTS`, and a line says its exit status. It forks
before any backend of jax, and with it any thread, is there. What the libraries read of
`env` when they are imported, as jax does, it cannot heed. The package's own rooms are
imported as well, but no command: a fork runs it from its file.
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

LIMIT_SECONDS = 400
LIBRARIES = (flax.linen, jax, optax, orbax.checkpoint)


def import_rooms() -> None:
    """Import the modules in the folders of bertjax."""
    package = importlib.import_module("bertjax")
    for module in pkgutil.walk_packages(package.__path__, "bertjax."):
        if module.name.count(".") > 1:
            importlib.import_module(module.name)


def become(
    name: str, arguments: list[str], env: dict[str, str], stdout: str, stderr: str
) -> None:
    """Be that command, with files as its output."""
    for path, number in ((os.devnull, 0), (stdout, 1), (stderr, 2)):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
    # The buffer of the old one holds orders to come.
    sys.stdin = open(0)  # noqa: SIM115
    sys.argv = [name, *arguments]
    os.environ.update(env)
    sys.path[0] = os.getcwd()  # as `python -m` has it, not this file's folder
    sys.path[1:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    runpy.run_module(f"bertjax.{name}", run_name="__main__", alter_sys=True)


def wait(pid: int) -> int:
    """Return the exit status of a process, as subprocess does."""
    timer = threading.Timer(LIMIT_SECONDS, os.kill, (pid, signal.SIGKILL))
    timer.start()
    _, status = os.waitpid(pid, 0)
    timer.cancel()
    timer.join()
    return os.waitstatus_to_exitcode(status)


def serve() -> dict | None:
    """Fork for each order; a fork returns its own, the server None at the end."""
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
