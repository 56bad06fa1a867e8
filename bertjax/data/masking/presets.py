# SPDX-License-Identifier: Apache-2.0
"""Define how tokens are chosen and corrupted: one value for every published scheme.

The official maskers differ from each other and from their papers; each difference is a
field of `Masking`, and a preset is a value of it. masker.py does the masking.
"""

import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from bertjax import UserError
from bertjax.registry import pick


def harmonic(longest: int) -> tuple[float, ...]:
    """Return the distribution of lengths 1 to `longest` with shares 1 / n (ALBERT).

    >>> [round(share * 11) for share in harmonic(3)]
    [6, 3, 2]
    """
    total = sum(1 / n for n in range(1, longest + 1))
    return tuple(1 / n / total for n in range(1, longest + 1))


def geometric(p: float, longest: int) -> tuple[float, ...]:
    """Return the geometric distribution of lengths up to `longest` (SpanBERT), scaled.

    >>> sum(n * share for n, share in enumerate(geometric(0.2, 10), 1))  # mean length
    3.797...
    """
    shares = [p * (1 - p) ** n for n in range(longest)]
    return tuple(share / sum(shares) for share in shares)


@dataclass(frozen=True)
class Masking:
    """How positions are chosen and corrupted.

    rate: share of a row's tokens, special ones included, that is predicted.
    unit: what is chosen as a whole: "token", "word", "entity" (the entities in the
        store's `marks`; nothing else is eligible), or "concept" (as many words of
        data.concept as others, concepts.py).
    lengths: the distribution of the number of neighboring units chosen together: the
        shares of 1, 2, ... units. n-grams of words: unit="word", lengths=harmonic(3).
    count: how many tokens a row of n predicts: "round" (BERT: max(1, round(rate * n))),
        "ceil", or "stochastic" (RoBERTa: floor(rate * n + U), U uniform in [0, 1)).
    slots: how many predictions a row has room for: "ceil" (of rate * length) or
        "electra" (floor((rate + 0.005) * length)); see `predictions_per_sequence`.
    weights: the weight with which a unit is drawn: "uniform", "rare" (DistilBERT:
        count^-0.7, where count is that of its first token in the training text), or
        "table" (that of its first token in data.mask_weights, mask_weights.py).
    repeats: draw positions with replacement; a position drawn twice has weight 2.
    mask_share, random_share: shares of the predicted tokens that become the mask token
        or a random token; the others stay.
    similar: use a similar word instead of the mask token (MacBERT).
    outcome: what draws one outcome as a whole: each "piece", each "word" (or entity),
        or each "span" (all units chosen together).
    replacement: distribution of random tokens: "uniform" or "unigram" (as in the
        training text).
    eligible: what may be predicted: "text" (nothing special), "unknown" (text and the
        unknown token) or "all" (every real token).
    random_from: the ids random tokens are drawn from: "text" or "vocabulary" (all).
    """

    rate: float = 0.15
    unit: str = "token"
    lengths: tuple[float, ...] = (1.0,)
    count: str = "round"
    slots: str = "ceil"
    weights: str = "uniform"
    repeats: bool = False
    mask_share: float = 0.8
    random_share: float = 0.1
    similar: bool = False
    outcome: str = "piece"
    replacement: str = "uniform"
    eligible: str = "text"
    random_from: str = "text"


REPLACEMENTS = {"uniform": "uniform", "unigram": "unigram"}
# The fields that data.mask_unit changes in a preset.
UNITS: dict[str, dict[str, Any]] = {
    "token": {"unit": "token", "lengths": (1.0,)},
    "word": {"unit": "word", "lengths": (1.0,)},
    "ngram": {"unit": "word", "lengths": harmonic(3)},
    "span": {"unit": "word", "lengths": geometric(0.2, 10), "outcome": "span"},
    "entity": {"unit": "entity", "lengths": (1.0,)},
    "concept": {"unit": "concept", "lengths": (1.0,)},
}
PRESETS = {
    # google-research/bert, create_pretraining_data.py
    "bert": Masking(),
    # fairseq, data/mask_tokens_dataset.py: one outcome for a whole word
    "roberta": Masking(count="stochastic", outcome="word"),
    # google-research/albert, create_pretraining_data.py: n-grams of words, p(n) ~ 1/n;
    # each piece draws its outcome
    "albert": Masking(unit="word", lengths=harmonic(3)),
    # google-research/electra, pretrain/pretrain_helpers.py: no random tokens
    "electra": Masking(slots="electra", mask_share=0.85, random_share=0.0),
    # transformers, research_projects/distillation/distiller.py. There the budget is
    # ceil(rate * tokens) of a whole batch and its rows compete; a row must not depend
    # on its neighbors, so here each row has its own budget.
    "distilbert": Masking(count="ceil", weights="rare"),
    # SpanBERT, fairseq/data/masking.py. There the last word is cut at the budget and
    # adjacent spans share an outcome; here words stay whole and spans separate.
    "spanbert": Masking(
        unit="word", lengths=geometric(0.2, 10), count="ceil", outcome="span"
    ),
    # Cui et al. 2020, section 3.1 (the code is unpublished): similar words instead of
    # the mask token. They mask 15% of the words; here it is 15% of the tokens, which is
    # the same on average.
    "macbert": Masking(
        unit="word", lengths=(0.4, 0.3, 0.2, 0.1), similar=True, outcome="word"
    ),
}
# What the official code does and bertjax does only with data.paper_compat=True; the
# fields are those of `Masking`.
PAPER_COMPAT: dict[str, dict[str, Any]] = {
    "bert": {"eligible": "unknown", "random_from": "vocabulary"},
    "roberta": {"eligible": "all"},
    "albert": {"eligible": "unknown", "random_from": "vocabulary"},
    "electra": {"eligible": "unknown", "repeats": True},
    "distilbert": {"random_from": "vocabulary"},
}


def make_masking(
    preset: str,
    *,
    rate: float | None = None,
    unit: str | None = None,
    lengths: str | None = None,
    corruption: str | None = None,
    replacement: str | None = None,
    weights: str = "",
    paper_compat: bool = False,
) -> Masking:
    """Create a masking from a preset and refinements; None keeps the preset's value.

    Args:
      preset: a name of PRESETS.
      rate: data.mask_rate, in (0, 1].
      unit: data.mask_unit, a name of UNITS.
      lengths: data.mask_lengths, the distribution of the number of units chosen
        together: shares of 1, 2, ... that sum to 1 ("0.4,0.3,0.2,0.1"),
        "harmonic:LONGEST" or "geometric:P:LONGEST". With unit="token" it chooses
        n-grams of tokens.
      corruption: data.corruption, the shares of mask (or similar word), random and
        keep, which sum to 1: "0.8,0.1,0.1".
      replacement: data.replacement, a name of REPLACEMENTS.
      weights: data.mask_weights, a file.
      paper_compat: data.paper_compat, the preset's entry of PAPER_COMPAT applies.

    Raises UserError for unknown names, values out of range, and combinations without
    meaning.

    >>> make_masking("bert", rate=0.4).rate
    0.4
    >>> make_masking("bert", unit="ngram", lengths="0.5,0.5").lengths
    (0.5, 0.5)
    """
    masking = pick("data.masking", preset, PRESETS)
    changes = dict(PAPER_COMPAT.get(preset, {})) if paper_compat else {}
    if rate is not None:
        changes["rate"] = rate
    if unit is not None:
        changes |= pick("data.mask_unit", unit, UNITS)
    if lengths is not None:
        changes["lengths"] = _law(lengths)
    if corruption is not None:
        shares = _shares("data.corruption", corruption)
        if len(shares) != 3:
            raise UserError(
                f"data.corruption={corruption!r} needs three shares: mask, random, keep"
            )
        changes |= {"mask_share": shares[0], "random_share": shares[1]}
    if replacement is not None:
        changes["replacement"] = pick("data.replacement", replacement, REPLACEMENTS)
    if weights:
        changes["weights"] = "table"
    masking = dataclasses.replace(masking, **changes)
    if (masking.unit, masking.lengths) != ("token", (1.0,)):
        masking = dataclasses.replace(masking, repeats=False)  # only for single tokens
    if masking.unit == "concept" and len(masking.lengths) > 1:
        raise UserError(
            f"data.mask_lengths={lengths!r} does not go with data.mask_unit=concept: "
            "words of a concept are chosen one at a time"
        )
    if masking.weights != "uniform" and len(masking.lengths) > 1:
        what = "rare" if masking.weights == "rare" else "weighted"
        why = f"{what} tokens are drawn one unit at a time"
    elif weights and masking.repeats:
        why = "with data.paper_compat tokens are drawn again and again, without weights"
    elif masking.similar and masking.unit == "token":
        why = "similar words replace whole words"
    else:
        return masking
    key = f"data.mask_unit={unit!r}" if unit else f"data.mask_lengths={lengths!r}"
    if weights and (unit is lengths is None or masking.repeats):
        key = f"data.mask_weights={weights!r}"
    raise UserError(f"{key} does not go with data.masking={preset!r}: {why}")


def predictions_per_sequence(masking: Any, length: int) -> int:
    """Return P, the room for predictions in a row, of a masking, a masker or a rate.

    P is ceil(rate * length), computed from the rate's decimal digits; with
    slots="electra" it is floor((rate + 0.005) * length) (electra,
    configure_pretraining.py).

    >>> predictions_per_sequence(0.15, 128), predictions_per_sequence(0.07, 100)
    (20, 7)
    >>> predictions_per_sequence(PRESETS["electra"], 128)
    19
    """
    rate = getattr(masking, "rate", masking)
    exact = Fraction(repr(float(rate)))
    if isinstance(masking, Masking) and masking.slots == "electra":
        return max(1, math.floor((exact + Fraction(1, 200)) * length))
    return math.ceil(exact * length)


def _law(text: str) -> tuple[float, ...]:
    """Read data.mask_lengths."""
    key = f"data.mask_lengths={text!r}"
    name, *numbers = text.split(":")
    try:
        if name == "harmonic" and len(numbers) == 1:
            longest, p = int(numbers[0]), 0.5
        elif name == "geometric" and len(numbers) == 2:
            longest, p = int(numbers[1]), float(numbers[0])
        elif name.isalpha():
            raise ValueError(name)
        else:
            return _shares("data.mask_lengths", text)
    except ValueError:
        raise UserError(
            f"{key} is not a distribution: 'harmonic:3', 'geometric:0.2:10' or shares"
        ) from None
    if not (0 < p < 1 and 1 <= longest <= 1000):
        raise UserError(f"{key} needs 0 < P < 1 and a longest length of 1 to 1000")
    return harmonic(longest) if name == "harmonic" else geometric(p, longest)


def _shares(key: str, text: str) -> tuple[float, ...]:
    """Read shares that sum to 1, such as "0.8,0.1,0.1"."""
    try:
        shares = tuple(float(share) for share in text.split(","))
    except ValueError:
        raise UserError(f"{key}={text!r} must be shares such as 0.8,0.1,0.1") from None
    if not all(0 <= share <= 1 for share in shares):
        raise UserError(f"{key}={text!r}: each share must be from 0 to 1")
    if abs(sum(shares) - 1) > 1e-6:
        raise UserError(f"{key}={text!r} must sum to 1, not {sum(shares):.6g}")
    return shares
