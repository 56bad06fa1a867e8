# SPDX-License-Identifier: Apache-2.0
"""UniLMv2's pseudo-masked language model (Bao et al. 2020, section 3)."""

from bertjax import UserError
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import without_pooler
from bertjax.objectives.base import Objective
from bertjax.objectives.combine import combine
from bertjax.objectives.token_head import make_token_head


def make_objective(
    cfg: EncoderConfig, blocks: float = 0.4, longest: int = 6, z_loss: float = 0.0
) -> tuple[Objective, EncoderConfig]:
    """Predict masked tokens in two ways in one pass: all at once, and block by block
    (partially autoregressive).

    The loss is the unweighted sum (equation 5) of `mlm_loss` at the masks and
    `par_loss` at the pseudo masks; both use the same head. blocks: the share of blocks
    with 2 to `longest` tokens, each length equally likely; the other blocks have 1
    token. z_loss: see `make_token_head`. Raises UserError for a decoder.
    """
    if cfg.is_decoder:
        raise UserError(
            "model.is_decoder=True: a pseudo-masked LM has bidirectional attention: "
            "set model.is_decoder=False"
        )
    needs = frozenset({f"pmlm:blocks={blocks},longest={longest}"})
    heads = [make_token_head(name, needs, z_loss=z_loss) for name in ("mlm", "par")]
    cfg = without_pooler(cfg)
    return combine(heads, cfg), cfg
