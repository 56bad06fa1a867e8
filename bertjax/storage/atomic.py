# SPDX-License-Identifier: Apache-2.0
"""Write a file whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from bertjax import UserError


def write_whole(
    out: Path, content: bytes | Callable[[IO[bytes]], Any], what: str
) -> None:
    """Write a file beside its place and rename it: it is there whole or not at all.

    content: or what writes it to a file. Raises UserError, which begins with `what`,
    when it cannot be written.
    """
    draft = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            file.write(content) if isinstance(content, bytes) else content(file)
        draft.replace(out)
    except OSError as e:
        raise UserError(f"{what} cannot be written: {e.strerror or e}") from e
    finally:
        draft.unlink(missing_ok=True)


def check_out(name: str, flag: str, ending: str = "") -> Path:
    """Return the file to write, which a flag names.

    ending: of its name, in any case. Raises UserError for what cannot be one.
    """
    out = Path(name).expanduser()
    if "://" in name:
        raise UserError(f"{flag}={name}: it is written to a disk of this machine")
    if ending and out.suffix.lower() != ending:
        raise UserError(f"{flag}={name} is no name of such a file: it ends in {ending}")
    if out.is_dir():
        raise UserError(f"{flag}={name} is a directory: name a file in it")
    if not out.parent.is_dir():
        raise UserError(
            f"{flag}={name} cannot be written: {out.parent} is no directory"
        )
    return out
