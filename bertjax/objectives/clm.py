# SPDX-License-Identifier: Apache-2.0
"""Causal language modeling: every token predicts the next (Radford et al. 2018)."""

from bertjax.objectives.base import Head
from bertjax.objectives.token_head import make_token_head


def make_head(z_loss: float = 0.0, sampled_vocab: int = 0) -> Head:
    """Make the head that predicts the next token everywhere, the masked LM's head.

    z_loss, sampled_vocab: see `make_token_head`.
    """
    needs = frozenset({"clm"})
    return make_token_head(
        "clm",
        needs,
        everywhere=True,
        z_loss=z_loss,
        causal=True,
        sampled_vocab=sampled_vocab,
    )
