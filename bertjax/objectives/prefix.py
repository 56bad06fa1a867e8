# SPDX-License-Identifier: Apache-2.0
"""Prefix language modeling: a context sees all of itself; the rest is causal."""

from bertjax.objectives.base import Head
from bertjax.objectives.token_head import make_token_head


def make_head(least: float = 0.0, most: float = 1.0, z_loss: float = 0.0) -> Head:
    """Make the head that predicts the tokens after a context (Raffel et al. 2020,
    section 3.2.1).

    least, most: the range of the context's length, as shares of the text. z_loss: see
    `make_token_head`.
    """
    needs = frozenset({f"prefix:least={least},most={most}"})
    return make_token_head("prefix", needs, everywhere=True, z_loss=z_loss)
