# SPDX-License-Identifier: Apache-2.0
"""Apply common changes to the default config: sizes, smoke runs, finetuning."""

from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError, registry
from bertjax.config.durations import duration
from bertjax.config.schema import base
from bertjax.models.families import FAMILIES


def read_arg(
    arg: str | None,
    size: str,
    family: str = "bert",
    sizes: Mapping[str, Any] | None = None,
) -> tuple[str, bool]:
    """Read a config's ARG ("mini", "smoke", "mini,smoke") as (size, whether smoke).

    size: the size if ARG names none. sizes: the allowed sizes, if they are not those of
    the family. Raises UserError for other words and for two sizes.
    """
    words = [w for w in (arg or "").split(",") if w]
    sizes = sizes or FAMILIES[family].sizes
    for word in words:
        registry.pick("the config's ARG", word, {**sizes, "smoke": {}})
    smoke = "smoke" in words
    given = [w for w in words if w in sizes]
    if len(given) > 1:
        raise UserError(f"the config's ARG={arg!r} names {len(given)} sizes: give one")
    return (given or ["tiny" if smoke else size])[0], smoke


def split_arg(
    arg: str | None, names: Sequence[str]
) -> tuple[dict[str, str], str | None]:
    """Split a config's ARG into NAME=VALUE words and the rest; raises UserError.

    >>> split_arg("task=rte,smoke", ["task"])
    ({'task': 'rte'}, 'smoke')
    """
    words = [w.partition("=") for w in (arg or "").split(",") if w]
    named = {name: value for name, sign, value in words if sign}
    for name in named:
        registry.pick("the config's ARG", name, dict.fromkeys(names))
    return named, ",".join(word for word, sign, _ in words if not sign) or None


def make_smoke(config: ConfigDict) -> ConfigDict:
    """Shrink a config to seconds on a laptop; all keys can still be overridden."""
    config.batch_size = 8
    config.dtype = "float32"
    config.total = duration(steps=20)
    config.data.length = 64
    config.data.engine = "python"
    config.data.vocab_size = 2048
    config.data.train = config.data.valid = "builtin:docs"
    config.optim.lr = 1e-3
    config.optim.warmup = duration(steps=2)
    config.log.every = duration(steps=1)
    config.eval.every = duration(steps=10)
    config.eval.examples = 64
    config.checkpoint.every = duration(steps=10)
    return config


def finetuning(
    smoke: bool = False,
    *,
    lr: float,
    batch_size: int = 32,
    epochs: float = 3,
    length: int = 128,
) -> ConfigDict:
    """Return base() with the usual changes for finetuning; the text is the user's.

    Devlin et al. 2019, appendix A.3: batch 32, 3 epochs, warm-up over a tenth of the
    steps. Each epoch ends with an evaluation on all rows and a checkpoint.
    """
    config = base()
    config.data.engine = "python"
    config.batch_size = batch_size
    config.total = duration(epochs=epochs)
    config.optim.lr = lr
    config.optim.warmup = duration(percent=10)
    config.eval.every = duration(epochs=1)
    config.checkpoint.every = duration(epochs=1)
    config.log.every = duration(steps=10)
    config = make_smoke(config) if smoke else config
    config.data.train = config.data.valid = ""
    config.data.length = min(length, 128) if smoke else length
    config.eval.examples = 0
    return config
