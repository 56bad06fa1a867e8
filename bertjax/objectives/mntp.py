# SPDX-License-Identifier: Apache-2.0
"""Masked next-token prediction (Charpentier and Samuel 2024, GPT-BERT).

A masked token is predicted from the position before it, so that the same head serves as
a causal LM's.
"""

from bertjax.objectives.base import Head
from bertjax.objectives.token_head import make_token_head


def make_head(z_loss: float = 0.0, sampled_vocab: int = 0) -> Head:
    """Make the masked LM's head that predicts a masked token one position to its left.

    z_loss, sampled_vocab: see `make_token_head`.
    """
    needs = frozenset({"mntp"})
    return make_token_head("mntp", needs, z_loss=z_loss, sampled_vocab=sampled_vocab)
