# SPDX-License-Identifier: Apache-2.0
"""bertjax: pretrain, evaluate and use masked language models in JAX."""

__version__ = "0.1.0"


class UserError(Exception):
    """The user's input or config is at fault.

    The message is one clear line that names the file, line or config key. Every
    command prints it as `error: ...` and exits with status 2.
    """


class RunError(Exception):
    """A run cannot go on, through no fault of its input: one clear line, status 1."""


def counted(n: int, one: str, many: str = "") -> str:
    """Write a number of things; many: of more than one, where it is not one + "s".

    >>> counted(1, "row has", "rows have"), counted(2000, "row")
    ('1 row has', '2,000 rows')
    """
    return f"{n:,} {one if n == 1 else many or f'{one}s'}"
