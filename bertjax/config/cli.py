# SPDX-License-Identifier: Apache-2.0
"""Run a command: its exit status, and what it prints for people."""

import os
import sys
from collections.abc import Callable, Sequence

from bertjax import RunError, UserError


def say(text: str) -> None:
    """Speak on stderr: stdout belongs to results."""
    print(text, file=sys.stderr, flush=True)


def command(main: Callable[[Sequence[str]], int | None]) -> None:
    """Run a command and leave with its status; a UserError is one line and status 2.

    Its output is UTF-8, as its files are, whatever the terminal's encoding is.
    """
    # A directory's name may be no text.
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        status = main(sys.argv[1:]) or 0
    except (UserError, RunError) as e:
        say(f"error: {e}")
        status = 2 if isinstance(e, UserError) else 1
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # head, less and the like have read enough
        status = 0
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of tf.data and of a library import may still run: nothing is left to do.
    os._exit(status)
