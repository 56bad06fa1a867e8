# SPDX-License-Identifier: Apache-2.0
"""Config keys, their defaults, and overrides from the command line.

Config files import it as `from bertjax import config as c`.
"""

from bertjax.config.arguments import load_config
from bertjax.config.durations import UNITS, duration
from bertjax.config.recipes import finetuning, make_smoke, read_arg, split_arg
from bertjax.config.schema import base

__all__ = [
    "UNITS",
    "base",
    "duration",
    "finetuning",
    "load_config",
    "make_smoke",
    "read_arg",
    "split_arg",
]
