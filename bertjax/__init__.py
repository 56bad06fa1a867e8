# SPDX-License-Identifier: Apache-2.0
"""bertjax: pretrain, evaluate and use masked language models in JAX.

`load` opens a model and `fit` trains one. Importing the
package loads neither jax nor numpy.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertjax.api import Model

__version__ = "0.2.0"
__all__ = ["RunError", "UserError", "__version__", "fit", "load"]


class UserError(Exception):
    """The user's input or config is at fault.

    The message is one clear line that names the file, line or config key. Every
    command prints it as `error: ...` and exits with status 2.
    """


class RunError(Exception):
    """A run cannot continue, but its input is not at fault: one line, status 1."""


def counted(n: int, one: str, many: str = "") -> str:
    """Write a count with its noun; `many` is the plural where it is not `one` + "s".

    >>> counted(1, "row has", "rows have"), counted(2000, "row")
    ('1 row has', '2,000 rows')
    """
    return f"{n:,} {one if n == 1 else many or f'{one}s'}"


def join_names(names: Sequence[str], most: int = 3) -> str:
    """List names with commas, but at most the first `most` of them.

    >>> join_names(["a", "b"]), join_names(["a", "b", "c", "d", "e"])
    ('a, b', 'a, b, c and 2 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def load(path: str, dtype: str = "float32", weights: str = "") -> "Model":
    """Open a model: a workdir, one of its checkpoints, or a Hugging Face directory.

    dtype: the type that it computes in. weights: "raw", "ema", or "" for the moving
    average if the run has one. Raises UserError if `path` is not a model.

    >>> model = bertjax.load("runs/quickstart")
    >>> model.fill_mask("This function returns a [MASK] of strings.")
    """
    from bertjax.api import Model

    return Model.open(path, dtype, weights)


def fit(config: Any, workdir: str, *, allow_config_change: bool = False) -> int:
    """Train to the end of a config, or resume it, like the command `bertjax.train`.

    config: a ConfigDict, such as a config file's get_config returns. Returns 0. After
    an interrupt (KeyboardInterrupt) the same call resumes from the last checkpoint.
    Raises UserError and RunError, with the command's messages.
    """
    from bertjax import api

    return api.fit(config, workdir, allow_config_change)
