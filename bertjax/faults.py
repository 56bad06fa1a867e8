# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a command's flags or its config file, in a line."""

import os
import re
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags
from ml_collections.config_dict import ConfigDict

from bertjax import registry
from bertjax.defaults import base


def tell(error: Exception, argv: Sequence[str]) -> str:
    """Name the flag at fault, or FILE:LINE of the config, given as --config=FILE."""
    given = (a.split("=", 1)[1] for a in argv if re.match("--?config=", a))
    file = next(given, "").partition(":")[0]
    path = os.path.abspath(file)
    for cause in _chain(error):
        frames = traceback.extract_tb(cause.__traceback__)
        lines = [x.lineno for x in frames if os.path.abspath(x.filename) == path]
        if lines:
            return f"{file}:{lines[-1]}: {type(cause).__name__}: {_line(cause)}"
    if isinstance(error, (AttributeError, KeyError)):
        return _unknown_key(error, argv)
    if isinstance(error, (flags.Error, TypeError, ValueError, OSError)):
        return _line(error)
    return f"the config file: {type(error).__name__}: {_line(error)}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield what led to an error, the first first: libraries say it again."""
    if error is not None:
        yield from _chain(error.__context__)
        yield error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _unknown_key(error: Exception, argv: Sequence[str]) -> str:
    """Name the flag whose key no config has, and the keys there are beside it."""
    for flag in (arg.split("=")[0] for arg in argv):
        command, *names = flag.lstrip("-").split(".")
        known: Any = base()
        for name in names if command == "config" else ():
            if not isinstance(known, ConfigDict):
                return f"{flag} is unknown: there are no keys within a value"
            if name not in known:
                return f"{flag} is unknown{registry.hint(name, known)}"
            known = known[name]
    return f"the config file: {_line(error)}"
