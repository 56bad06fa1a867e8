# SPDX-License-Identifier: Apache-2.0
"""Look things up by name; an unknown name is answered with the nearest known one."""

import contextlib
import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from bertjax import UserError

Option = str | int | float | bool


def unknown(key: str, name: str, known: Iterable[str]) -> UserError:
    """Make the error for a name that nothing carries.

    >>> str(unknown("objective", "mlmm", ["mlm", "nsp"]))
    "objective='mlmm' is unknown; did you mean 'mlm'? known: mlm, nsp"
    """
    return UserError(f"{key}={name!r} is unknown{hint(name, known)}")


def hint(name: str, known: Iterable[str]) -> str:
    """Say which known name is the nearest, and all of them."""
    known = sorted(known)
    near = [k for k in known if k.endswith(f"/{name}")]  # a file in a folder
    alike = 0.75 if len(name) > 3 else 0.65  # a wrong letter of three is a third
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=alike)
    meant = f" did you mean {near[0]!r}?" if near else ""
    return f";{meant} known: {', '.join(known)}"


def pick(key: str, name: str, table: Mapping[str, Any]) -> Any:
    """Return `table[name]`; a UserError names the config key and what is known."""
    if name not in table:
        raise unknown(key, name, table)
    return table[name]


def parse_options(text: str, key: str = "") -> tuple[str, dict[str, Option]]:
    """Split "name:option=value,option=value" into the name and its options.

    Values are true or false, ints, floats, and else strings. key: the config key that
    holds the text, for the message. Raises UserError where an option has no value.

    >>> parse_options("my.module:rate=0.2,longest=3,kind=word,whole=true")
    ('my.module', {'rate': 0.2, 'longest': 3, 'kind': 'word', 'whole': True})
    """
    name, _, rest = text.partition(":")
    options = {}
    for option in filter(None, rest.split(",")):
        option_name, equals, value = (part.strip() for part in option.partition("="))
        if not (option_name and equals and value):
            where = f"{key}={text!r}" if key else repr(text)
            raise UserError(f"{where}: {option!r} is not of the form OPTION=VALUE")
        options[option_name] = _parse_value(value)
    return name, options


def _parse_value(text: str) -> Option:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def names(package: str) -> list[str]:
    """List the modules of a package without importing them."""
    spec = importlib.util.find_spec(package)
    paths = spec.submodule_search_locations or []
    return sorted(m.name for m in pkgutil.iter_modules(paths))


def check_module(key: str, name: str, package: str, hidden: Iterable[str] = ()) -> str:
    """Return the full name of module `name` of `package`, without importing it.

    A dotted name is taken as it stands, so that users extend without forking.
    Raises UserError when there is no such module.
    """
    if "." in name:
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise UserError(
                f"{key}={name!r}: there is no module of that name; the folder that "
                "holds it belongs into PYTHONPATH"
            )
        return name
    known = [n for n in names(package) if n not in set(hidden)]
    if name not in known:
        raise unknown(key, name, known)
    return f"{package}.{name}"


def load(key: str, name: str, package: str, hidden: Iterable[str] = ()) -> ModuleType:
    """Import the module that `check_module` finds."""
    return importlib.import_module(check_module(key, name, package, hidden))
