# SPDX-License-Identifier: Apache-2.0
"""Masked diffusion: predict masks drawn at any rate, with losses weighted by the rate.

Sahoo et al. 2024 (MDLM), Nie et al. 2025 (LLaDA), Arriola et al. 2025 (BD3-LM).
"""

from bertjax.objectives.base import Head, TokenIds
from bertjax.objectives.token_head import make_token_head


def make_head(
    tokens: TokenIds,
    schedule: str = "linear",
    weights: str = "mdlm",
    low: float = 0.0,
    high: float = 1.0,
    block: int = 0,
    eps: float = 1e-3,
    z_loss: float = 0.0,
) -> Head:
    """Make the masked LM's head, in which [MASK] has probability 0.

    The loss is the sum of weighted token losses over the number of tokens of text.
    Options: see data/features/diffusion.py; z_loss: see `make_token_head`.
    """
    host = f"schedule={schedule},weights={weights},low={low},high={high}"
    return make_token_head(
        "diffusion",
        frozenset({f"diffusion:{host},block={block},eps={eps}"}),
        everywhere=not block,
        z_loss=z_loss,
        never=tokens.mask_id,
    )
