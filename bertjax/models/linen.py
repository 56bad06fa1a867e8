# SPDX-License-Identifier: Apache-2.0
"""The encoder as a Flax module, for code that composes modules.

    encoder = linen.Encoder(cfg)
    variables = encoder.init(jax.random.key(0), batch)
    encoded = encoder.apply(variables, batch)                          # no dropout
    encoded = encoder.apply(variables, batch, rngs={"dropout": key})   # training

variables["params"] is the tree under "encoder" in a checkpoint of bertjax, so a
pretrained encoder is {"params": params["encoder"]}. In a module that names it `encoder`
its parameters are in variables["params"]["encoder"]. An NNX model uses it through
`flax.nnx.bridge.ToNNX(linen.Encoder(cfg), rngs=nnx.Rngs(0)).lazy_init(batch)`.
"""

import flax.linen as nn
import jax

from bertjax.models import encoder
from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Params


class Encoder(nn.Module):
    """Run `encoder.apply`: a batch of arrays [B, L] -> hidden and pooled.

    Dropout is on if there is an rng named "dropout". Raises flax's ScopeParamShapeError
    for parameters of another config.
    """

    cfg: EncoderConfig

    @nn.compact
    def __call__(self, batch: dict[str, jax.Array]) -> encoder.Encoded:
        def init(rng: jax.Array, name: str) -> Params:
            return encoder.init(rng, self.cfg)[name]

        names = jax.eval_shape(lambda: encoder.init(jax.random.key(0), self.cfg))
        params = {name: self.param(name, init, name) for name in names}
        rng = self.make_rng("dropout") if self.has_rng("dropout") else None
        return encoder.apply(params, self.cfg, batch, rng)
