# SPDX-License-Identifier: Apache-2.0
"""Look things up by name, and load plug-ins.

An unknown name is answered with the nearest known one. What a plug-in raises becomes
one line that names the plug-in and its line at fault.
"""

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
# Plug-in modules that were imported -> what named them, as "data.masking='a.b'".
OUTSIDE: dict[str, str] = {}
# Folders that hold no plug-ins: this package, the libraries, Python's own modules.
_JAX = importlib.util.find_spec("jax")
_FOLDERS = (
    Path(bertjax.__file__).parent,
    Path(os.__file__).parent,
    Path(_JAX.origin if _JAX and _JAX.origin else os.__file__).parents[1],
)
INSIDE = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)
SITE = INSIDE[-1]  # plug-ins may be installed here, too
_LIBRARIES = "flax", "jax", "jaxlib", "ml_collections", "numpy", "optax", "tensorflow"
LIBRARIES = INSIDE[0], *(f"{SITE}{name}{os.sep}" for name in _LIBRARIES)


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda value: all(hasattr(value, name) for name in names)


_LOSSES, _TRANSFORM = _has("init", "weights", "sums"), _has("init", "update")

# Function of a plug-in -> what it must return, and a check of that.
RETURNS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "make_attention": ("a function of q, k, v, mask, rate and rng", callable),
    "make_features": (
        "a bertjax.data.features.base.Features",
        _has("specs", "make", "count", "raw"),
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
    """Build the error for an unknown name.

    >>> str(unknown("objective", "mlmm", ["mlm", "nsp"]))
    "objective='mlmm' is unknown; did you mean 'mlm'? known: mlm, nsp"
    """
    return UserError(f"{key}={name!r} is unknown{hint(name, known)}")


def hint(name: str, known: Iterable[str]) -> str:
    """Name the nearest known name, if any, and list all of them."""
    known, name = sorted(known), str(name)
    near = [k for k in known if k.endswith(f"/{name}")]  # a file in a folder
    alike = 0.75 if len(name) > 3 else 0.65  # one wrong letter of three is a third
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=alike)
    meant = f" did you mean {near[0]!r}?" if near else ""
    return f";{meant} known: {', '.join(known) or 'none'}"


def pick(key: str, name: str, table: Mapping[str, Any]) -> Any:
    """Return `table[name]`; raise a UserError with the config key and known names."""
    if name not in table:
        raise unknown(key, name, table)
    return table[name]


def split_list(text: str) -> list[str]:
    """Split a comma-separated list; drop empty entries.

    >>> split_list("a.txt, b/*.txt.gz,,tfds:wiki40b/en:train[:1%]")
    ['a.txt', 'b/*.txt.gz', 'tfds:wiki40b/en:train[:1%]']
    """
    return [part for part in map(str.strip, text.split(",")) if part]


def parse_options(text: str, key: str = "") -> tuple[str, dict[str, Option]]:
    """Split "name:option=value,option=value" into the name and its options.

    Values become true or false, ints or floats if they look like it, otherwise
    strings. key: the config key that holds the text, for messages. Raises UserError
    for an option without a value.

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
    """Import an optional dependency.

    If it is missing, raises UserError that begins with
    `place` and says how to install it.
    """
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

    Dotted names are returned as they are, so users can extend without forking. Raises
    UserError if there is no such module.
    """
    if "." in name:
        importlib.invalidate_caches()  # a notebook may just have written the module
        try:  # this imports the packages around the module
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

    Raises UserError if a plug-in cannot be imported.
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
    """Describe in one line what a plug-in raised, and where."""
    return UserError(f"{what}: {describe(error)}")


def is_outside(text: str) -> bool:
    """Return whether a name, with or without options, is that of a plug-in module.

    >>> is_outside("my_lab.lion:b3=0.9"), is_outside("adamw")
    (True, False)
    """
    return "." in text.partition(":")[0]


def load_outside(
    key: str, text: str, maker: str
) -> tuple[ModuleType, dict[str, Option]]:
    """Import the module that "my_lab.lion:b3=0.9" names; also return its options.

    Raises UserError if there is no such module, or it does not define `maker`.
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
    """Call the function `maker` of a plug-in module: make_head, make_optimizer, ...

    args: its first arguments. offered: values that are passed if the function
    has arguments of these names; they are not options. Raises UserError for
    unknown options, for options of another type than their default, for nan, for
    infinity unless it is the default, for anything that a plug-in's function
    raises, and as `check_result` does.
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
    """Return the result of a plug-in's function.

    Raises UserError if it is not what RETURNS demands.
    """
    what, is_right = RETURNS.get(function, ("", lambda value: True))
    if not is_right(value):
        raise UserError(
            f"{key}: {module.__name__}.{function} must return {what}, and returned "
            f"{reprlib.repr(value)}"
        )
    return value


def argument_names(key: str, module: ModuleType, maker: str) -> tuple[str, ...]:
    """Return the argument names of a plug-in's function."""
    return tuple(inspect.signature(_maker(key, module, maker)).parameters)


def _maker(key: str, module: ModuleType, maker: str) -> Callable[..., Any]:
    if function := getattr(module, maker, None):
        return function
    raise UserError(f"{key}: the module {module.__name__} does not define {maker}")


def _convert(where: str, value: Option, argument: inspect.Parameter) -> Any:
    """Convert an option to the type of its argument: 1 may become True or 1.0.

    The type is that of the annotation, or else of the default; if the default is an
    int, any number is accepted.
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
    """Describe an exception and its line at fault: "KeyError: 'a' (FILE, line 3)"."""
    if isinstance(error, SyntaxError):  # no line of the file ran
        reason, file, line = error.msg, error.filename, error.lineno
    else:
        frame = line_at_fault(traceback.extract_tb(error.__traceback__))
        reason, file, line = str(error), frame.filename, frame.lineno
    what = ": ".join(filter(None, [type(error).__name__, " ".join(reason.split())]))
    return f"{what} ({file}, line {line})"


def line_at_fault(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary:
    """Return the last frame in a plug-in, or the last frame if there is none.

    A plug-in may be installed among the libraries; then it is the last
    frame that is not in LIBRARIES.
    """
    outside = [f for f in frames if not f.filename.startswith(INSIDE)]
    installed = [
        f
        for f in frames
        if f.filename.startswith(SITE) and not f.filename.startswith(LIBRARIES)
    ]
    return (outside or installed or frames)[-1]


def part_at_fault(error: Exception) -> str:
    """Name the plug-in that raised as a config or a flag names it, or return "".

    For instance "data.masking='my_lab.thirds'".
    """
    walked = (
        f.f_globals.get("__name__") for f, _ in traceback.walk_tb(error.__traceback__)
    )
    known = [OUTSIDE[name] for name in walked if name in OUTSIDE]
    return known[-1] if known else ""
