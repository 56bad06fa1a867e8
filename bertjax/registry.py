# SPDX-License-Identifier: Apache-2.0
"""Look things up by name; an unknown name is answered with the nearest known one, and
what a part from outside raises in a line that names the part and its own line."""

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import math
import os
import pkgutil
import reprlib
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import bertjax
from bertjax import UserError

__all__ = [
    "load",
    "load_outside",
    "make",
    "parse_options",
    "pick",
    "split_list",
    "unknown",
]

Option = str | int | float | bool
# Modules from outside that were imported, and what named them: "data.masking='a.b'".
OUTSIDE: dict[str, str] = {}
# Where a part from outside is not: this package, the libraries, Python's own modules.
_JAX = importlib.util.find_spec("jax")
_FOLDERS = (
    Path(bertjax.__file__).parent,
    Path(os.__file__).parent,
    Path(_JAX.origin if _JAX and _JAX.origin else os.__file__).parents[1],
)
INSIDE = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)
SITE = INSIDE[-1]  # where a part from outside may be installed, too
_LIBRARIES = "flax", "jax", "jaxlib", "ml_collections", "numpy", "optax", "tensorflow"
LIBRARIES = INSIDE[0], *(f"{SITE}{name}{os.sep}" for name in _LIBRARIES)


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda value: all(hasattr(value, name) for name in names)


_LOSSES, _TRANSFORM = _has("init", "weights", "sums"), _has("init", "update")

# Function of a plug-in -> what it must return, and whether a value is that.
RETURNS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "make_attention": ("a function of q, k, v, mask, rate and rng", callable),
    "make_features": (
        "a bertjax.data.features.base.Features",
        _has("specs", "make", "tell", "raw"),
    ),
    "make_head": ("a bertjax.objectives.base.Head", _LOSSES),
    "make_masker": (
        "a bertjax.data.masking.masker.Masker, with choose, corrupt, tables and rate",
        _has("choose", "corrupt", "tables", "rate"),
    ),
    "make_objective": (
        "a bertjax.objectives.base.Objective and an EncoderConfig",
        lambda pair: isinstance(pair, tuple) and len(pair) == 2 and _LOSSES(pair[0]),
    ),
    "make_optimizer": (
        "an optax transform, or a list of them",
        lambda tx: all(map(_TRANSFORM, tx if isinstance(tx, list) else [tx])),
    ),
    "make_schedule": ("a function of the update", callable),
    "score": ("bertjax.scoring.scorer.Scores", _has("objects", "lines", "notes")),
}


def unknown(key: str, name: str, known: Iterable[str]) -> UserError:
    """Make the error for a name that nothing carries.

    >>> str(unknown("objective", "mlmm", ["mlm", "nsp"]))
    "objective='mlmm' is unknown; did you mean 'mlm'? known: mlm, nsp"
    """
    return UserError(f"{key}={name!r} is unknown{hint(name, known)}")


def hint(name: str, known: Iterable[str]) -> str:
    """Say which known name is the nearest, and all of them, if there are any."""
    known, name = sorted(known), str(name)
    near = [k for k in known if k.endswith(f"/{name}")]  # a file in a folder
    alike = 0.75 if len(name) > 3 else 0.65  # a wrong letter of three is a third
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=alike)
    meant = f" did you mean {near[0]!r}?" if near else ""
    return f";{meant} known: {', '.join(known) or 'none'}"


def pick(key: str, name: str, table: Mapping[str, Any]) -> Any:
    """Return `table[name]`; a UserError names the config key and what is known."""
    if name not in table:
        raise unknown(key, name, table)
    return table[name]


def split_list(text: str) -> list[str]:
    """Split a list with commas; empty entries are none.

    >>> split_list("a.txt, b/*.txt.gz,,tfds:wiki40b/en:train[:1%]")
    ['a.txt', 'b/*.txt.gz', 'tfds:wiki40b/en:train[:1%]']
    """
    return [part for part in map(str.strip, text.split(",")) if part]


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


def import_extra(name: str, extra: str, place: str) -> ModuleType:
    """Import a module of an optional dependency, or raise UserError, which begins with
    the place, how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"{place}: needs {name.partition('.')[0]}: pip install 'bertjax[{extra}]'"
        ) from None


def names(package: str) -> list[str]:
    """List the modules of a package without importing them."""
    spec = importlib.util.find_spec(package)
    paths = spec.submodule_search_locations if spec else None
    return sorted(m.name for m in pkgutil.iter_modules(paths or []))


def check_module(key: str, name: str, package: str, hidden: Iterable[str] = ()) -> str:
    """Return the full name of module `name` of `package`, without importing it.

    A dotted name is taken as it stands, so that users extend without forking.
    Raises UserError when there is no such module.
    """
    if "." in name:
        importlib.invalidate_caches()  # a notebook may have written it just now
        try:  # which imports the packages that it lies in
            found = importlib.util.find_spec(name)
        except Exception as e:
            absent = isinstance(e, ImportError | ValueError)
            if not absent or not name.startswith(getattr(e, "name", None) or name):
                raise _outside_error(f"{key}={name!r} cannot be imported", e) from e
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
    """Import the module that `check_module` finds.

    Raises UserError where one from outside cannot be imported.
    """
    full = check_module(key, name, package, hidden)
    if "." in name:
        OUTSIDE[name] = f"{key}={name!r}"
    try:
        return importlib.import_module(full)
    except Exception as e:
        if "." not in name or isinstance(e, UserError):
            raise
        raise _outside_error(f"{key}={name!r} cannot be imported", e) from e


def _outside_error(what: str, error: Exception) -> UserError:
    """Return in a line what a module from outside raised, and where."""
    return UserError(f"{what}: {describe(error)}")


def is_outside(text: str) -> bool:
    """True for the name of a module outside the package, whatever its options are.

    >>> is_outside("my_lab.lion:b3=0.9"), is_outside("adamw")
    (True, False)
    """
    return "." in text.partition(":")[0]


def load_outside(
    key: str, text: str, maker: str
) -> tuple[ModuleType, dict[str, Option]]:
    """Import the module that "my_lab.lion:b3=0.9" names; also return its options.

    Raises UserError where there is no such module, or it does not define `maker`.
    """
    name, options = parse_options(text, key)
    module = load(key, name, "")
    _maker(key, module, maker)
    return module, options


def make(
    key: str,
    module: ModuleType,
    maker: str,
    options: Mapping[str, Option],
    *args: Any,
    **offered: Any,
) -> Any:
    """Call the function `maker` of a plug-in's module: make_head, make_optimizer, ...

    args: its first arguments. offered: passed where it has arguments of these names,
    which are no options. Raises UserError for an option that it does not have, or
    that has another type than the option's default, is nan or, where that is not the
    default, infinite, for what a function from outside raises, and for what
    `check_result` does.
    """
    function = _maker(key, module, maker)
    known = dict(list(inspect.signature(function).parameters.items())[len(args) :])
    given = {name: offered[name] for name in known.keys() & offered}
    known = {name: known[name] for name in known if name not in given}
    where = f"{key}: option of {module.__name__}"
    for name, value in options.items():
        if name not in known:
            raise unknown(where, name, known)
        given[name] = _convert(f"{where}: {name}", value, known[name])
    try:
        inspect.signature(function).bind(*args, **given)
    except TypeError as e:
        raise UserError(f"{key}: {module.__name__}.{maker}: {e}") from None
    try:
        value = function(*args, **given)
    except Exception as e:
        if isinstance(e, UserError) or module.__name__.startswith("bertjax."):
            raise
        raise _outside_error(f"{key}: {module.__name__}.{maker}", e) from e
    return check_result(key, module, maker, value)


def check_result(key: str, module: ModuleType, function: str, value: Any) -> Any:
    """Return what a plug-in's function returned. Raises UserError where RETURNS says
    that it is something else."""
    what, is_right = RETURNS.get(function, ("", lambda value: True))
    if not is_right(value):
        raise UserError(
            f"{key}: {module.__name__}.{function} must return {what}, and returned "
            f"{reprlib.repr(value)}"
        )
    return value


def argument_names(key: str, module: ModuleType, maker: str) -> tuple[str, ...]:
    """Return the names of the arguments of a plug-in's function."""
    return tuple(inspect.signature(_maker(key, module, maker)).parameters)


def _maker(key: str, module: ModuleType, maker: str) -> Callable[..., Any]:
    if function := getattr(module, maker, None):
        return function
    raise UserError(f"{key}: the module {module.__name__} does not define {maker}")


def _convert(where: str, value: Option, argument: inspect.Parameter) -> Any:
    """Give an option the type of its argument: 1 is also True or 1.0.

    The type is the annotation, else the default's; a default of 1 may be any number.
    """
    kind = argument.annotation
    if kind not in (str, int, float, bool):
        kind = type(argument.default)
        if kind is int:
            kind = float if isinstance(value, str) else type(value)
    usual = argument.default
    is_free = kind is str or (isinstance(usual, float) and value == usual)
    if isinstance(value, float) and not (is_free or math.isfinite(value)):
        raise UserError(f"{where}={value} is not a finite number")
    if kind not in (str, int, float, bool):
        return value
    if kind is str or type(value) is kind:
        return kind(value)
    is_number = not isinstance(value, str | bool)
    if kind is float and is_number:
        return float(value)
    if kind is int and is_number and float(value).is_integer():
        return int(value)
    if kind is bool and value in (0, 1):
        return bool(value)
    what = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
    raise UserError(f"{where}={value} is not {what}")


def describe(error: Exception) -> str:
    """Return what was raised, and the line at fault: "KeyError: 'a' (FILE, line 3)"."""
    if isinstance(error, SyntaxError):  # no line of it was run
        reason, file, line = error.msg, error.filename, error.lineno
    else:
        frame = line_at_fault(traceback.extract_tb(error.__traceback__))
        reason, file, line = str(error), frame.filename, frame.lineno
    what = ": ".join(filter(None, [type(error).__name__, " ".join(reason.split())]))
    return f"{what} ({file}, line {line})"


def line_at_fault(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """Return the last line of a part from outside; of one that is installed among the
    libraries the last that is none of those which compute; without one the last."""
    outside = [f for f in frames if not f.filename.startswith(INSIDE)]
    installed = [
        f
        for f in frames
        if f.filename.startswith(SITE) and not f.filename.startswith(LIBRARIES)
    ]
    return (outside or installed or frames)[-1]


def part_at_fault(error: Exception) -> str:
    """Return the part from outside that raised, as a config or a flag names it:
    "data.masking='my_lab.thirds'"; "" where none was at work."""
    walked = (
        f.f_globals.get("__name__") for f, _ in traceback.walk_tb(error.__traceback__)
    )
    known = [OUTSIDE[name] for name in walked if name in OUTSIDE]
    return known[-1] if known else ""
