# SPDX-License-Identifier: Apache-2.0
"""Configs: every key, its default, and how a command line changes it.

What config files are written with: `from bertjax import config as c`.
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
