# SPDX-License-Identifier: Apache-2.0
"""Dialogue: the tokens of an answer, each from the turns before it and those so far."""

from bertjax.objectives.base import Head
from bertjax.objectives.token_head import make_token_head


def make_head(z_loss: float = 0.0) -> Head:
    """Predict answers behind a context (Bao et al. 2021, PLATO-XL, section 3).

    Rows are those of data.plan=turns. z_loss: see `make_token_head`.
    """
    return make_token_head("dialogue", frozenset({"dialogue"}), z_loss=z_loss)
