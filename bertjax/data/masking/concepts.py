# SPDX-License-Identifier: Apache-2.0
"""Choose words of a concept and an equal number of other words.

Feder et al. 2021 (CausaLM, arXiv 2005.13407; amirfeder/CausaLM,
pregenerate_training_data.py) mask adjectives and as many other tokens, at most 15% of a
text, so that a head that distinguishes the two kinds gains nothing from their shares.
Their code alternates between the kinds until the budget is used up, so that a text may
have one more of one kind; here words are chosen in pairs.
"""

import numpy as np

from bertjax.data.masking.choose import MAX_NOISE, TOP, Units, low_bits, take_in_order
from bertjax.data.token_flags import CONCEPT


def choose_concepts(
    noise: np.ndarray,
    units: Units,
    begins: np.ndarray,
    marks: np.ndarray,
    budget: np.ndarray,
) -> np.ndarray:
    """Return the chosen units (choose.find_units), ascending: each row has as many
    concept units as others.

    noise: u64 [b, L] of choose.draw_noise; begins: bool [b, L], where units begin;
    marks: u8 [b, L], only the bit CONCEPT is read; budget: i64 [b], in tokens. In the
    order of their noise, the first concept unit and the first other unit form a pair,
    and so on; a pair is chosen if both fit in the rest of the budget.

    Worked example: words of one token, budget 4, concept words b and e, in the order of
    their noise e c a b d:

        units     a  b  c  d  e        pairs   e c   b a
        taken     1  1  1     1
    """
    b, length = noise.shape
    size_at = np.zeros(b * length, np.int64)
    size_at[units.first] = units.size
    base = np.arange(b)[:, None] * length
    at, sizes = [], []
    concept = (marks & CONCEPT) > 0
    for kind in (concept, ~concept):
        order = np.sort(np.where(begins & kind, noise, MAX_NOISE), axis=1)
        used = order < TOP
        where = base + (order & low_bits(length)).astype(np.int64) * used
        at.append(where)
        sizes.append(size_at.take(where) * used)
    both = (sizes[0] + sizes[1]) * ((sizes[0] > 0) & (sizes[1] > 0))
    taken = take_in_order(both, budget)
    first = np.concatenate([where[taken] for where in at])
    return np.searchsorted(units.first, np.sort(first))
