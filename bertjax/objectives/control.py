# SPDX-License-Identifier: Apache-2.0
"""Keep a concept that is correlated with the unlearned one: a head for data.control.

Feder et al. 2021 (CausaLM, arXiv 2005.13407, section 3): the words of data.control are
a confounder that the encoder must keep while it unlearns the concept. Words that also
belong to the unlearned concept do not count.
"""

from bertjax.objectives.base import Head
from bertjax.objectives.concept import make_label_head


def make_head(of: str = "words", weight: float = 1.0) -> Head:
    return make_label_head("control", of, weight)
