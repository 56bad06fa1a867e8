# SPDX-License-Identifier: Apache-2.0
"""Define a command's flags from a table, and write its --help."""

import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import flags


class Flag(NamedTuple):
    """A flag: its help, its default, and the bounds of a number.

    kind: its type, needed if there is no default and it is not text. A tuple as default
    makes a flag that can be repeated, a list one with comma-separated values.
    """

    help: str
    default: Any = None
    kind: type | None = None
    least: float | None = None
    most: float | None = None

    @property
    def value_type(self) -> type:
        return self.kind or (str if self.default is None else type(self.default))


Table = Mapping[str, Flag]
DEFINE = {
    str: flags.DEFINE_string,
    bool: flags.DEFINE_boolean,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    list: flags.DEFINE_list,
    tuple: flags.DEFINE_multi_string,
}

# Flags that several commands share.
SHARED = {
    "model": Flag("a workdir, one of its checkpoints, or a Hugging Face directory"),
    "workdir": Flag("directory of the run"),
    "step": Flag(
        "checkpoint of the workdir to use; default: its best or newest", kind=int
    ),
    "batch_size": Flag("rows per batch", 32, least=1),
    "dtype": Flag("precision of the computation: float32 or bfloat16", "float32"),
    "weights": Flag(
        "raw (the parameters) or ema (their moving average); default: the average if "
        "there is one",
        "",
    ),
    "json": Flag("print JSON", False),
    "index": Flag("answer questions from this index (bertjax.embed --index)"),
    "retriever": Flag("with --index: the model that retrieves, if it is another one"),
    "passages": Flag("with --index: passages per question", kind=int, least=1),
}
CONFIG = {
    "config=FILE[:ARG]": "a config file, or the name of a shipped one, such as bert.py",
    "config.KEY=VALUE": "set a key; bertjax/config/schema.py lists all keys",
}
REPEATED = " (can be repeated)"
WIDTH, COLUMN = 79, 26


def shared(*names: str) -> Table:
    """Return the named flags of SHARED."""
    return {name: SHARED[name] for name in names}


def define_flags(table: Table) -> flags.FlagValues:
    """Define the flags of a table."""
    values = flags.FlagValues()
    for name, flag in table.items():
        ends = {"lower_bound": flag.least, "upper_bound": flag.most}
        bounds = ends if flag.value_type in (int, float) else {}
        define = DEFINE[flag.value_type]
        define(name, flag.default, flag.help, flag_values=values, **bounds)
    return values


def describe(doc: str, table: Table, with_config: bool) -> str:
    """Return the text of --help, with one or more lines for each flag of a table."""
    listed = {**CONFIG} if with_config else {}
    for name, flag in table.items():
        listed[_head(name, flag)] = flag.help + REPEATED * (flag.default == ())
    lines = [doc.strip(), "", "flags:"]
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent=" " * COLUMN)
    for head, body in listed.items():
        head = f"  --{head}"
        if len(head) >= COLUMN:
            lines.append(head)
            head = ""
        wrapper.initial_indent = head.ljust(COLUMN)
        lines += wrapper.wrap(body)
    return "\n".join(lines)


def _head(name: str, flag: Flag) -> str:
    if flag.value_type is bool:
        return f"{name}=false" if flag.default else name
    default = flag.default
    if isinstance(default, list | tuple):
        default = ",".join(default)
    return f"{name}={'...' if default in (None, '') else default}"
