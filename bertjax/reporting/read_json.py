# SPDX-License-Identifier: Apache-2.0
"""Read JSON that a flag names."""

import json
from pathlib import Path
from typing import Any

from bertjax import UserError


def read_objects(name: str, flag: str) -> list[tuple[int, dict[str, Any]]]:
    """Read (line, object) of a file: one in the whole of it, or one a line.

    Raises UserError naming flag, file and line.
    """
    try:
        text = Path(name).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{flag}={name}: there is no such file") from None
    except OSError as e:
        raise UserError(f"{flag}={name}: cannot be read ({e.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{flag}={name}: no text in UTF-8") from None
    found: list[tuple[int, Any]] = []
    try:
        found.append((1, json.loads(text)))
    except json.JSONDecodeError as whole:
        for number, line in enumerate(text.split("\n"), 1):
            try:
                if line.strip():
                    found.append((number, json.loads(line)))
            except json.JSONDecodeError as e:
                # Where no line is whole, an object lies on several.
                at, fault = (number, e) if found else (whole.lineno, whole)
                said = f"{flag}={name}, line {at}: no JSON: {fault.msg}"
                raise UserError(said) from None
    for number, one in found:
        if not isinstance(one, dict):
            raise UserError(f"{flag}={name}, line {number}: no JSON object")
    if not found:
        raise UserError(f"{flag}={name}: the file is empty")
    return found
