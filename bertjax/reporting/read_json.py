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
        raise UserError(f"{flag}={name} is not text in UTF-8") from None
    objects: list[tuple[int, Any]] = []
    try:
        objects.append((1, json.loads(text)))
    except json.JSONDecodeError as whole:
        for number, line in enumerate(text.split("\n"), 1):
            try:
                if line.strip():
                    objects.append((number, json.loads(line)))
            except json.JSONDecodeError as e:
                # Where no line is whole, an object lies on several.
                at, fault = (number, e) if objects else (whole.lineno, whole)
                raise UserError(
                    f"{flag}={name}, line {at} is not JSON: {fault.msg}"
                ) from None
    for number, one in objects:
        if not isinstance(one, dict):
            raise UserError(f"{flag}={name}, line {number} is not a JSON object")
    if not objects:
        raise UserError(f"{flag}={name}: the file is empty")
    return objects
