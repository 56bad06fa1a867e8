# SPDX-License-Identifier: Apache-2.0
"""Sentence-order prediction: are A and B in order (0) or swapped (1)?

Lan et al. 2020 (ALBERT), section 3.1. Both come from one chunk of a document, so the
topic tells nothing.
"""

from bertjax.objectives.base import Head
from bertjax.objectives.pair import make_pair_head


def make_head() -> Head:
    return make_pair_head("sop")
