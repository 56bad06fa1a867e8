# SPDX-License-Identifier: Apache-2.0
"""Dialogue: predict each token of an answer from earlier turns and earlier tokens."""

from bertjax.objectives.base import Head
from bertjax.objectives.token_head import make_token_head


def make_head(z_loss: float = 0.0) -> Head:
    """Make the head that predicts answers in context (Bao et al. 2021, PLATO-XL,
    section 3).

    The rows come from data.plan=turns. z_loss: see `make_token_head`.
    """
    return make_token_head("dialogue", frozenset({"dialogue"}), z_loss=z_loss)
