# SPDX-License-Identifier: Apache-2.0
"""What scores of lines come to together; no jax."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


def total(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up pseudo-log-likelihoods, in nats, of the lines that have one.

    lines: {"text", "score" (None where it is too long, or no token), "tokens", "words",
    "unknown"}.
    """
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
        "pseudo_log_likelihood": score,
        "pseudo_perplexity": math.exp(min(-score / counts["tokens"], 700)),
        "bits_per_character": -score / math.log(2) / characters,
    }
