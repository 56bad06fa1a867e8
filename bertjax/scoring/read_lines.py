# SPDX-License-Identifier: Apache-2.0
"""Read the lines of files as they stand: what is scored is not repaired."""

from collections.abc import Iterator
from typing import NamedTuple

from bertjax import UserError
from bertjax.data.corpus import files
from bertjax.data.corpus.sources import expand_paths, split_sources


class Line(NamedTuple):
    """A line of a file, counted from 1, without its end."""

    file: str
    number: int
    text: str

    @property
    def place(self) -> str:
        """Name file and line, for messages."""
        return f"{self.file}, line {self.number}"


def read_lines(value: str) -> Iterator[Line]:
    """Yield the lines of --text: paths or patterns, several with commas, also packed.

    Raises UserError naming what is missing, damaged or not UTF-8.
    """
    for entry in split_sources(value):
        for path in expand_paths(entry, "--text"):
            files.read_head(path, "--text")
            content = b"".join(files.unpacked(path)).removeprefix(b"\xef\xbb\xbf")
            for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), 1):
                try:
                    text = line.removesuffix(b"\r").decode()
                except UnicodeDecodeError as e:
                    raise UserError(
                        f"--text={path}, line {number}: not UTF-8 "
                        f"(byte {e.start + 1} of the line)"
                    ) from None
                yield Line(path, number, text)
