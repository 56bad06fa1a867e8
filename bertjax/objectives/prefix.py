# SPDX-License-Identifier: Apache-2.0
"""Prefix language modelling: a context sees itself, the rest is predicted in order."""

from bertjax.objectives.base import Head
from bertjax.objectives.token_head import make_token_head


def make_head(least: float = 0.0, most: float = 1.0, z_loss: float = 0.0) -> Head:
    """Predict the next token behind a context (Raffel et al. 2020, section 3.2.1).

    least, most: the shares of a text between which its context is drawn.
    """
    needs = frozenset({f"prefix:least={least},most={most}"})
    return make_token_head("prefix", needs, everywhere=True, z_loss=z_loss)
