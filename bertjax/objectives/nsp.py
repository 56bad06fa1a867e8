# SPDX-License-Identifier: Apache-2.0
"""Next-sentence prediction: does B follow A (0) or not (1)?

Devlin et al. 2019, section 3.1, task 2.
"""

from bertjax.objectives.base import Head
from bertjax.objectives.pair import make_pair_head


def make_head() -> Head:
    return make_pair_head("nsp")
