# SPDX-License-Identifier: Apache-2.0
"""Run a command, print for people, and set its exit status."""

import os
import re
import sys
from collections.abc import Callable, Sequence

from bertjax import RunError, UserError, registry


def say(text: str) -> None:
    """Print to stderr; stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def why_no_memory(error: Exception) -> str:
    """Return jax's message if a device ran out of memory, "" for other errors.

    >>> class JaxRuntimeError(RuntimeError): pass
    >>> why_no_memory(JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 9 GiB.\\nA"))
    'Out of memory: 9 GiB'
    """
    text, names = str(error), ("JaxRuntimeError", "XlaRuntimeError")
    if type(error).__name__ not in names or "RESOURCE_EXHAUSTED" not in text:
        return ""
    found = re.search("(Ran out|Out) of memory.*", text) or [text]
    return found[0].split("\n")[0].strip(" .")[:200]


def command(main: Callable[[Sequence[str]], int | None]) -> None:
    """Run a command and exit with its status.

    A UserError, and any exception that a plug-in raises, is printed as one line with
    status 2. Output is UTF-8, like the files, whatever the terminal's encoding is.
    """
    # A directory's name may not be valid text.
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
    except Exception as e:
        if reason := why_no_memory(e):
            say(
                f"error: the device's memory is full ({reason}): make batches smaller "
                "(batch_size); training has accumulate and model.remat=full too, "
                "docs/training.md"
            )
        elif part := registry.part_at_fault(e):
            say(f"error: {part}: {registry.describe(e)}")
        else:
            raise
        status = 2
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of tf.data and of imported libraries may still run; nothing is left to do.
    os._exit(status)
