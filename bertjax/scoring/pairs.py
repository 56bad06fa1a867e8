# SPDX-License-Identifier: Apache-2.0
"""Score minimal pairs: how often the good sentence is likelier than the bad one.

As in BLiMP (Warstadt et al. 2020) it returns the share for each paradigm and the mean
over paradigms. A tie counts one half.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.data.corpus.line_repair import load_json
from bertjax.scoring import sequence_scorers
from bertjax.scoring.confidence import interval
from bertjax.scoring.lines import Line, read_lines
from bertjax.scoring.pseudo_likelihoods import pick_variant
from bertjax.scoring.scorer import Scores, identify

FLAGS = ("variant", "scorer", "draws", "estimator")
SENTENCES = ("sentence_good", "sentence_bad")
NEEDED = (*SENTENCES, "UID")
WIDER = {"by_field": "field", "by_term": "linguistics_term"}  # optional fields


def score(args: Any, path: str, flag: str) -> Scores:
    """Score the pairs of --text by the ln p of their sentences."""
    pick_variant(args.variant)
    if not args.text:
        raise UserError("--what=pairs compares pairs: give --text=FILE, JSON lines")
    pairs, empty = read_pairs(read_lines(args.text))
    scorer, lm = sequence_scorers.open_language_model(
        args, path, flag, args.scorer, "--scorer"
    )
    options = sequence_scorers.read_options(args, scorer)
    texts = [text for pair in pairs for text in (pair.good, pair.bad)]
    for i, ids in enumerate(lm.tokenizer.encode_batch(texts)):
        if not len(ids):  # a text without tokens has no likelihood
            place, field = pairs[i // 2].place, SENTENCES[i % 2]
            raise UserError(f"--text={place}: the field {field} has no token")
    scores = sequence_scorers.score_texts(lm, texts, scorer, options)
    likelihoods = [one.score for one in scores]
    results = compare(pairs, likelihoods[::2], likelihoods[1::2])
    about = identify(args, lm.meta) | {"scorer": scorer, "empty_lines": empty}
    for name, readers in sequence_scorers.READERS.items():
        if scorer in readers:
            about[name] = getattr(options, name)
    lines = table(results) + [f"empty lines: {empty:,}"] * bool(empty)
    return Scores([about | results], lines)


class Pair(NamedTuple):
    """Two sentences that differ in one respect, and the phenomenon that it tests."""

    good: str
    bad: str
    about: Mapping[str, str]  # "UID", the paradigm, and any fields of WIDER
    place: str = ""  # file and line, for messages


def read_pairs(lines: Iterable[Line]) -> tuple[list[Pair], int]:
    """Parse JSON lines; return (pairs, number of empty lines).

    Raises UserError that names a line that is not an object, or lacks a field.
    """
    pairs, empty = [], 0
    for line in lines:
        if not line.text.strip():
            empty += 1
            continue
        record = load_json(line.text, f"--text={line.place}")
        if not isinstance(record, dict):
            raise UserError(f"--text={line.place}: not a JSON object")
        for field in NEEDED:
            value = record.get(field)
            if not isinstance(value, str) or not value.strip():
                what = "is empty or no string" if field in record else "is missing"
                raise UserError(f"--text={line.place}: the field {field} {what}")
        about = {
            name: record[name]
            for name in ("UID", *WIDER.values())
            if isinstance(record.get(name), str)
        }
        pairs.append(Pair(*(record[name] for name in SENTENCES), about, line.place))
    if not pairs:
        raise UserError("--text: there is no pair in it")
    return pairs, empty


def compare(
    pairs: Sequence[Pair], good: Sequence[float | None], bad: Sequence[float | None]
) -> dict[str, Any]:
    """Count right answers, without pairs that have a too long sentence (None).

    A tie counts one half, so a scorer that knows nothing gets 0.5. accuracy is the mean
    over paradigms; accuracy_ci95 is the half-width of its 95% interval, with the pairs
    of each paradigm as independent draws.
    """
    answers = [
        (pair.about, 0.5 if a == b else float(a > b))
        for pair, a, b in zip(pairs, good, bad, strict=True)
        if a is not None and b is not None
    ]
    if not answers:
        raise UserError("--text: each pair has a sentence too long for the model")
    right = _by_paradigm(answers)
    out: dict[str, Any] = {
        "accuracy": _mean(right),
        **interval("accuracy", _half_width(right)),
        "paradigms": len(right),
        "pairs": len(answers),
        "ties": sum(a == b for a, b in zip(good, bad, strict=True) if a is not None),
        "too_long": len(pairs) - len(answers),
        "by_paradigm": {
            name: {"accuracy": float(np.mean(part)), "pairs": len(part)}
            for name, part in sorted(right.items())
        },
    }
    for table, field in WIDER.items():
        names = sorted({about[field] for about, _ in answers if field in about})
        if names:
            parts = ([x for x in answers if x[0].get(field) == name] for name in names)
            means = [_mean(_by_paradigm(part)) for part in parts]
            out[table] = dict(zip(names, means, strict=True))
    return out


def _by_paradigm(
    answers: Iterable[tuple[Mapping[str, str], float]],
) -> dict[str, list[float]]:
    right: dict[str, list[float]] = {}
    for about, is_right in answers:
        right.setdefault(about["UID"], []).append(is_right)
    return right


def _mean(right: Mapping[str, Sequence[float]]) -> float:
    return float(np.mean([np.mean(part) for part in right.values()]))


def _half_width(right: Mapping[str, Sequence[float]]) -> float | None:
    """Return 1.96 standard errors of the mean of the paradigms' shares.

    None if their spread is unknown, because a paradigm has a single pair or because the
    answers within each paradigm are all the same.
    """
    if min(map(len, right.values())) < 2:
        return None
    variance = sum(np.var(part, ddof=1) / len(part) for part in right.values())
    if not variance:
        return None
    return float(1.96 * math.sqrt(variance) / len(right))


def table(results: Mapping[str, Any]) -> list[str]:
    """Return the result of `compare` as lines for people."""
    paradigms = results["by_paradigm"]
    wide = max(map(len, (*paradigms, "average over 9,999 paradigms")))
    lines = [f"{'paradigm':{wide}}  pairs  right"]
    for name, part in paradigms.items():
        lines.append(f"{name:{wide}} {part['pairs']:6,} {part['accuracy']:6.1%}")
    for key, name in WIDER.items():
        if key in results:
            lines += ["", name]
            for part, share in results[key].items():
                lines.append(f"{part:{wide}} {'':6} {share:6.1%}")
    average = f"average over {results['paradigms']:,} paradigms"
    width = f" (± {results['accuracy_ci95']:.1%})" if "accuracy_ci95" in results else ""
    lines += [
        "",
        f"{average:{wide}} {results['pairs']:6,} {results['accuracy']:6.1%}{width}",
        f"ties, counted as one half: {results['ties']:,}",
    ]
    if results["too_long"]:
        lines.append(f"left out, too long for the model: {results['too_long']:,}")
    return lines
