# SPDX-License-Identifier: Apache-2.0
"""Masked language modeling at the predicted positions only (Devlin et al. 2019)."""

from bertjax.objectives.base import Head
from bertjax.objectives.token_head import make_token_head


def make_head(z_loss: float = 0.0, sampled_vocab: int = 0) -> Head:
    """Make the head that predicts the tokens that the host masked.

    z_loss, sampled_vocab: see `make_token_head`.
    """
    needs = frozenset({"mlm"})
    return make_token_head("mlm", needs, z_loss=z_loss, sampled_vocab=sampled_vocab)
