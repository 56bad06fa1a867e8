# SPDX-License-Identifier: Apache-2.0
"""Find a command line's --config arguments: the file and its overrides."""

import inspect
import os
import re
import reprlib
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections.config_dict import ConfigDict

from bertjax import UserError, registry

# Values that absl does not parse itself: 1e6, and ramps of mask rates (0.3:0.15).
WRITTEN = re.compile(r"\d+\.?\d*([eE]\+?\d+|:[\d.]+)$")


def find_config(path: str) -> str:
    """Find the file of "configs/x.py:ARG", or of a config shipped with the package.

    Raises UserError when there is none.
    """
    file, colon, arg = os.path.expanduser(path).partition(":")
    package = Path(__file__).parents[1]
    shipped = package / "configs"
    # a checkout; an installed package has foreign configs beside it
    if not shipped.is_dir():
        shipped = package.parent / "configs"
    for folder in (Path(), shipped):
        if os.path.isfile(folder / file):  # False for names that are too long
            return f"{folder / file}{colon}{arg}"
    known = [p for p in shipped.rglob("*.py") if p.stem != "__init__"]
    names = [p.relative_to(shipped).as_posix() for p in known]
    folder = Path(file).parent
    if folder.is_absolute() or not os.path.isdir(shipped / folder):
        raise UserError(f"--config={file}: there is no such file")
    if f"{file}.py" in names:
        raise UserError(f"--config={file} is not a file; did you mean {file}.py?")
    raise registry.unknown("--config", file, names)


def load_config(path: str) -> ConfigDict:
    """Load the config that --config=PATH names, without overrides.

    path: "my/config.py:ARG", or a file shipped in the package, "bert.py:mini". Raises
    UserError when there is no such file or it does not return a ConfigDict.
    """
    path = str(path)
    file, colon, arg = find_config(path).partition(":")
    get_config = runpy.run_path(file).get("get_config")
    if get_config is None:
        raise UserError(f"--config={path}: the file does not define get_config")
    given = [arg] if colon else []
    try:
        inspect.signature(get_config).bind(*given)
    except TypeError as e:
        raise UserError(f"--config={path}: get_config: {e}") from None
    return check_type(path, get_config(*given))


def check_type(path: str, config: Any) -> ConfigDict:
    """Return the result of get_config for --config=PATH.

    Raises UserError if it is not a ConfigDict.
    """
    if not isinstance(config, ConfigDict):
        raise UserError(
            f"--config={path}: get_config must return a ConfigDict, and returned "
            f"{reprlib.repr(config)}"
        )
    return config


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the arguments that name a config or change its keys from the others.

    "--config FILE" is returned as "--config=FILE", which is easier to find.

    >>> split_arguments(["--config.data.packed", "--n", "3", "--config.seed", "-3"])
    (['--config.data.packed', '--config.seed', '-3'], ['--n', '3'])
    """
    own: list[str] = []
    others: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if re.match(r"--?config(?![^=.])", word):
            follows = "=" not in word and rest and not re.match("-+[a-z]", rest[0])
            if follows and "." in word:
                own += [word, rest.pop(0)]
            else:
                own.append(f"{word}={rest.pop(0)}" if follows else word)
        else:
            others.append(word)
    return own, others


def config_first(argv: list[str]) -> list[str]:
    """Put --config=FILE before its overrides; write whole numbers as absl expects."""
    first, rest = [], []
    while argv:
        arg = argv.pop(0)
        if re.fullmatch("--?config", arg) and argv:
            arg = f"--config={argv.pop(0)}"
        elif (
            re.fullmatch(r"--?config\.[\w.]+", arg) and argv and WRITTEN.match(argv[0])
        ):
            arg += f"={argv.pop(0)}"
        if match := re.fullmatch(r"--?config=(.*)", arg):
            first = [f"--config={find_config(match[1])}"]
            continue
        match = re.fullmatch(r"(--?config\.[\w.]+=)(\d+\.?\d*[eE]\+?\d+)", arg)
        if match and float(match[2]).is_integer():
            arg = f"{match[1]}{int(float(match[2]))}"
        match = re.fullmatch(r"(--?config\.data\.mask_rate=)(.*)", arg)
        if match and not match[2]:
            arg += "None"  # empty: clears a rate of the config file
        elif match and not re.fullmatch(r"[\d.eE+-]+|None", match[2]):
            # A ramp is passed as a Python string literal.
            arg = f"{match[1]}{match[2]!r}"
        rest.append(arg)
    return first + rest
