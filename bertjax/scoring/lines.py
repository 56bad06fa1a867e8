# SPDX-License-Identifier: Apache-2.0
"""Read lines of files unchanged, without repairs, and add up their scores."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bertjax import UserError, registry
from bertjax.data.corpus import files
from bertjax.data.corpus.sources import expand_paths

# Scorer -> prefix of the names log_likelihood and perplexity.
KINDS = {"pll": "pseudo_", "mntp": "pseudo_", "elbo": "bound_of_"}


class Line(NamedTuple):
    """A line of a file, without its line end; numbers begin at 1."""

    file: str
    number: int
    text: str

    @property
    def place(self) -> str:
        """The file and line, for messages."""
        return f"{self.file}, line {self.number}"


def read_lines(value: str) -> Iterator[Line]:
    """Yield the lines of the files in --text, which may be patterns or compressed.

    Raises UserError that names what is missing, damaged or not UTF-8.
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
    """Add up the scores, in nats, of the lines that have one.

    lines: {"text", "score" (None if too long or without a token), "tokens", "words",
    "unknown"}, and "scorer", which names the sums, if it is not pll.
    """
    kind = KINDS.get(lines[0].get("scorer", "pll") if lines else "pll", "")
    fitting = [line for line in lines if line["score"] is not None]
    counts = {"lines": len(fitting), "no_tokens": sum(not x["tokens"] for x in lines)}
    counts["too_long"] = len(lines) - len(fitting) - counts["no_tokens"]
    for name in ("tokens", "words", "unknown"):
        counts[name] = sum(line[name] for line in fitting)
    # White space does not count, because tokenizers differ in whether pieces have it.
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
