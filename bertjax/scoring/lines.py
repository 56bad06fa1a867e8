# SPDX-License-Identifier: Apache-2.0
"""Lines of files as they stand, which are scored unrepaired, and their totals."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bertjax import UserError, registry
from bertjax.data.corpus import files
from bertjax.data.corpus.sources import expand_paths

# What a scorer's sums are called before log_likelihood and perplexity.
KINDS = {"pll": "pseudo_", "mntp": "pseudo_", "elbo": "bound_of_"}


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
    for entry in registry.split_list(value):
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


def total(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up scores, in nats, of the lines that have one.

    lines: {"text", "score" (None where it is too long, or no token), "tokens", "words",
    "unknown"}, and "scorer" where it is not pll, by which the sums are named.
    """
    kind = KINDS.get(lines[0].get("scorer", "pll") if lines else "pll", "")
    fitting = [line for line in lines if line["score"] is not None]
    counts = {"lines": len(fitting), "no_tokens": sum(not x["tokens"] for x in lines)}
    counts["too_long"] = len(lines) - len(fitting) - counts["no_tokens"]
    for name in ("tokens", "words", "unknown"):
        counts[name] = sum(line[name] for line in fitting)
    # White space is no character: pieces have it or not, as their tokenizer likes.
    characters = sum(len("".join(line["text"].split())) for line in fitting)
    if not characters:
        return counts
    score = math.fsum(line["score"] for line in fitting)
    return {
        **counts,
        "characters": characters,
        f"{kind}log_likelihood": score,
        f"{kind}perplexity": math.exp(min(-score / counts["tokens"], 700)),
        "bits_per_character": -score / math.log(2) / characters,
    }
