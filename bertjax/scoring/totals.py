# SPDX-License-Identifier: Apache-2.0
"""What scores of lines come to together; no jax."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


def total(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up pseudo-log-likelihoods, in nats; lines that are too long count for none.

    lines: {"text", "score" (None where it is too long), "tokens", "words", "unknown"}.
    """
    fitting = [line for line in lines if line["score"] is not None]
    counts = {"lines": len(fitting), "too_long": len(lines) - len(fitting)}
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
        "pseudo_perplexity": math.exp(min(-score / max(counts["tokens"], 1), 700)),
        "bits_per_character": -score / math.log(2) / characters,
    }
