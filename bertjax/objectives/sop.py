# SPDX-License-Identifier: Apache-2.0
"""Sentence-order prediction: are A and B in order (0) or swapped (1)?

Lan et al. 2020 (ALBERT), section 3.1. Both segments come from the same chunk of a
document, so the topic does not reveal the answer.
"""

from bertjax.objectives.base import Head
from bertjax.objectives.pair import make_pair_head


def make_head() -> Head:
    return make_pair_head("sop")
