# SPDX-License-Identifier: Apache-2.0
"""Run one training as N processes on this machine, as a pod would.

    python launch/local_hosts.py --hosts=2 --devices=4 -- --config=... --workdir=...

Everything after -- goes to bertjax.train. Ends with the worst exit status of the
processes and one line about what happened; when one fails, the others are ended.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, required=True, help="processes")
    parser.add_argument("--devices", type=int, default=1, help="CPU devices each")
    parser.add_argument("rest", nargs="+", help="-- arguments of bertjax.train")
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
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

    def forward(number: int, frame: object) -> None:
        for p in processes:
            if p.poll() is None:
                p.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    while any(p.poll() is None for p in processes):
        lost = [h for h, p in enumerate(processes) if p.poll() not in (None, 0)]
        stopping = all(processes[h].returncode in (130, 143) for h in lost)
        if lost and not stopping:
            forward(signal.SIGKILL, None)
        time.sleep(0.1)
    codes = [p.returncode for p in processes]
    # A process ended by a signal has a negative code: that is worse than any status.
    failed = [code for code in codes if code not in (0, -signal.SIGKILL)]
    worst = next(iter(failed), max(codes, key=abs))
    said = "done" if not any(codes) else f"ended with {codes}"
    print(f"{args.hosts} hosts: {said}", file=sys.stderr)
    return 128 - worst if worst < 0 else worst


if __name__ == "__main__":
    sys.exit(main())
