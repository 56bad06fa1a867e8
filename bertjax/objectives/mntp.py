# SPDX-License-Identifier: Apache-2.0
"""Masked next-token prediction: a masked token is predicted from the place before it,
so that a causal LM's head is the same (Charpentier and Samuel 2024, GPT-BERT)."""

from bertjax.objectives.base import Head
from bertjax.objectives.token_head import make_token_head


def make_head(z_loss: float = 0.0) -> Head:
    """Predict masked tokens one place to the left, by the masked LM's head.

    z_loss: see `make_token_head`.
    """
    return make_token_head("mntp", frozenset({"mntp"}), z_loss=z_loss)
