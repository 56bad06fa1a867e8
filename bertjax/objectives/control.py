# SPDX-License-Identifier: Apache-2.0
"""Keep what goes along with a concept: a head of the words of data.control.

Feder et al. 2021 (CausaLM, arXiv 2005.13407, section 3): a confounder that must stay
while the concept is unlearnt. Words of the concept itself do not count.
"""

from bertjax.objectives.base import Head
from bertjax.objectives.concept import make_label_head


def make_head(of: str = "words", weight: float = 1.0) -> Head:
    return make_label_head("control", of, weight)
