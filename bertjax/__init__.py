# SPDX-License-Identifier: Apache-2.0
"""bertjax: pretrain, evaluate and use masked language models in JAX.

`load` opens a model and `fit` trains one; importing the package loads neither jax nor
numpy.
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
    """A run cannot go on, through no fault of its input: one clear line, status 1."""


def counted(n: int, one: str, many: str = "") -> str:
    """Write a number of things; many: of more than one, where it is not one + "s".

    >>> counted(1, "row has", "rows have"), counted(2000, "row")
    ('1 row has', '2,000 rows')
    """
    return f"{n:,} {one if n == 1 else many or f'{one}s'}"


def join_names(names: Sequence[str], most: int = 3) -> str:
    """Name things, of more than `most` the first ones.

    >>> join_names(["a", "b"]), join_names(["a", "b", "c", "d", "e"])
    ('a, b', 'a, b, c and 2 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def load(path: str, dtype: str = "float32", weights: str = "") -> "Model":
    """Open a model: a workdir, one of its checkpoints, or a Hugging Face directory.

    dtype: what it computes in. weights: "raw", "ema", or "" for the moving average
    where the run has one. Raises UserError where `path` is no model.

    >>> model = bertjax.load("runs/quickstart")
    >>> model.fill_mask("This function returns a [MASK] of strings.")
    """
    from bertjax.api import Model

    return Model.open(path, dtype, weights)


def fit(config: Any, workdir: str, *, allow_config_change: bool = False) -> int:
    """Train to the end of a config, from where the workdir stands: `bertjax.train`.

    config: a ConfigDict, as a config file's get_config returns it. Returns 0. An
    interrupt (KeyboardInterrupt) ends it as it stands; the same call goes on from the
    last checkpoint. Raises UserError and RunError, whose text is what the command says.
    """
    from bertjax import api

    return api.fit(config, workdir, allow_config_change)
