# SPDX-License-Identifier: Apache-2.0
"""What --help prints: a command's docstring, and each flag that it reads."""

import textwrap

from absl import flags

# Help of the flags that several commands have; a command defines that of its own.
SHARED = {
    "model": "a workdir, one of its checkpoints, or a Hugging Face directory",
    "workdir": "the directory that the run lives in",
    "step": "of a workdir another checkpoint than its newest or best",
    "batch_size": "rows at once",
    "dtype": "of the computation: float32 or bfloat16",
    "weights": "raw or ema: the parameters, or their moving average; unless given the "
    "average where there is one",
    "json": "print JSON",
}
CONFIG = (
    ("config=FILE[:ARG]", "a config file, or the name of one that is shipped: bert.py"),
    ("config.KEY=VALUE", "change a key; bertjax/config/schema.py has them all"),
)
NO_HELP = "(no help available)"  # absl's word for ""
REPEATED = ";\n    repeat this option"  # absl adds it to a flag that may be repeated
WIDTH, COLUMN = 79, 26


def describe(doc: str, values: flags.FlagValues, with_config: bool) -> str:
    """Return the text of --help: a line or more for each flag in `values`."""
    listed = [*CONFIG] if with_config else []
    listed += [(_head(flag), help_of(flag)) for flag in own_flags(values)]
    lines = [doc.strip(), "", "flags:"]
    for head, body in listed:
        head = f"  --{head}"
        if len(head) >= COLUMN:
            lines.append(head)
            head = ""
        lines += textwrap.wrap(
            body,
            WIDTH,
            initial_indent=head.ljust(COLUMN),
            subsequent_indent=" " * COLUMN,
        )
    return "\n".join(lines)


def own_flags(values: flags.FlagValues) -> list[flags.Flag]:
    """Return the flags that a command defined, in that order."""
    return [flag for own in values.flags_by_module_dict().values() for flag in own]


def _head(flag: flags.Flag) -> str:
    if flag.boolean:
        return f"{flag.name}=false" if flag.default else flag.name
    default = flag.default
    if isinstance(default, list):
        default = ",".join(default)
    return f"{flag.name}={'...' if default in (None, '') else default}"


def help_of(flag: flags.Flag) -> str:
    """Return the help of a flag."""
    several = " (can be repeated)" * isinstance(flag, flags.MultiFlag)
    help = "" if flag.help == NO_HELP else flag.help.partition(REPEATED)[0]
    return (help or SHARED.get(flag.name, "")) + several
