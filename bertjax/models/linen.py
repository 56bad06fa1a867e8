# SPDX-License-Identifier: Apache-2.0
"""The encoder as a Flax Linen module, for code that composes modules."""

import flax.linen as nn
import jax

from bertjax.models import encoder
from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Params


class Encoder(nn.Module):
    """Wrap `encoder.apply`; its parameters are `{"params": {"encoder": ...}}`.

    The tree under "encoder" is the one of a bertjax checkpoint, so that pretrained
    parameters drop in. Dropout is on where an rng called "dropout" is given.
    """

    cfg: EncoderConfig

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array]) -> encoder.Encoded:
        params: Params = self.param("encoder", encoder.init, self.cfg)
        rng = self.make_rng("dropout") if self.has_rng("dropout") else None
        return encoder.apply(params, self.cfg, batch, rng)
