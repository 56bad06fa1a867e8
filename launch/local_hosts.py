# SPDX-License-Identifier: Apache-2.0
"""Run one training as N processes on this machine, as on a pod.

    python launch/local_hosts.py --hosts=2 --devices=4 -- --config=... --workdir=...

Everything after -- is passed to bertjax.train. The exit status is the worst one of the
processes, with one line about what happened. If a process is lost, the others get
--grace seconds to end by themselves. The others also notice a process that is stopped
(config.hosts.timeout), and its host is named here.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

# after a signal, with everything saved
STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        usage="%(prog)s --hosts=N [options] -- ARGUMENTS OF bertjax.train",
    )
    parser.add_argument("--hosts", type=int, required=True, help="processes")
    parser.add_argument(
        "--devices", type=int, default=1, help="CPU devices each (%(default)s)"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=20.0,
        help="seconds to end in after a loss (%(default)s)",
    )
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if wrong := mistake(args):
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    came: list[int] = []  # signals, to be sent to all processes once all have started
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: came.append(number))
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={args.devices}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "bertjax.train", "--multihost", *args.rest],
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": flags,
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(args.hosts),
                "JAX_PROCESS_ID": str(host),
            },
        )
        for host in range(args.hosts)
    ]
    ended, killed = wait(processes, args.grace, came)
    codes = [status(p) for p in processes]
    # The status of a process that this launcher killed means nothing.
    worst = max((codes[h] for h in ended if h not in killed), key=badness, default=1)
    print(f"{args.hosts} hosts: {describe(codes, ended, killed)}", file=sys.stderr)
    return worst


def mistake(args: argparse.Namespace) -> str:
    """Describe what is wrong with the arguments, or return ""."""
    for name in ("hosts", "devices"):
        if getattr(args, name) < 1:
            return f"--{name}={getattr(args, name)} is below 1"
    if not args.rest:
        return "the arguments of bertjax.train are missing, after --"
    for name in ("config", "workdir"):
        if not value(name, args.rest):
            where = "among the arguments of bertjax.train, after --"
            return f"--{name}=... is missing {where}"
    return ""


def value(flag: str, arguments: list[str]) -> str:
    """Return the last value of a flag, or "" if the next word is another flag."""
    found = ""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, rest = word.partition("=")
        if name in (f"--{flag}", f"-{flag}"):
            found = rest if equals else following
            found = found if equals or not found.startswith("-") else ""
    return found


def status(process: subprocess.Popen) -> int:
    """Return an exit status as a shell does: 128 + the signal that killed."""
    code = process.poll()
    return 128 - code if code < 0 else code


def badness(code: int) -> tuple[bool, bool, int]:
    """Order exit statuses by severity: saved, failed, and worst a faulty config."""
    return code == 2, code not in (0, *STOPPED), code


def wait(
    processes: list[subprocess.Popen], grace: float, came: list[int]
) -> tuple[list[int], dict[int, str]]:
    """Wait for all; return (hosts in order of ending, states of those killed here).

    came: signals to pass on, which are removed from the list.
    """
    ended: list[int] = []
    killed: dict[int, str] = {}
    until = None  # when the others are killed
    while len(ended) < len(processes):
        while came:
            number = came.pop(0)
            for process in processes:
                process.send_signal(number)  # sends nothing if it has ended
        for host, process in enumerate(processes):
            if host not in ended and process.poll() is not None:
                ended.append(host)
                if until is None and status(process) not in (0, *STOPPED):
                    until = time.monotonic() + grace
        if until is not None and time.monotonic() > until:
            for host, process in enumerate(processes):
                if process.poll() is None and host not in killed:
                    killed[host] = state(process.pid)
                    process.kill()
        time.sleep(0.1)
    return ended, killed


def state(pid: int) -> str:
    """Describe the state of a process that does not end."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        letter = ""
    return "was stopped" if letter in "Tt" and letter else "did not end"


def describe(codes: list[int], ended: list[int], killed: dict[int, str]) -> str:
    """Describe in one line what happened, and on which host."""
    if not any(codes):
        return "done"
    if set(codes) <= {0, *STOPPED}:
        return f"stopped by a signal, saved; exit statuses {codes}"
    for host, what in killed.items():
        if what == "was stopped":
            return f"host {host} {what} (SIGSTOP): killed; exit statuses {codes}"
    host = next(h for h in ended if codes[h] and codes[h] not in STOPPED)
    what = f"ended first, with exit status {codes[host]}"
    lost = [h for h in ended if codes[h] > 128 and codes[h] not in STOPPED]
    for h in lost:
        if h not in killed and codes[h] != 128 + signal.SIGABRT:
            name = signal.Signals(codes[h] - 128).name
            host, what = h, f"was lost ({name})"
    late = "".join(f"; host {h} {x}: killed" for h, x in killed.items())
    return f"host {host} {what}{late}; exit statuses {codes}"


if __name__ == "__main__":
    sys.exit(main())
