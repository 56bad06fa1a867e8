# SPDX-License-Identifier: Apache-2.0
"""The masked LM once more, under a name of its own: its terms have the same names."""

import dataclasses

from bertjax.models import heads
from bertjax.objectives import mlm


def init(rng, cfg):
    return heads.init_mlm(rng, cfg)


def sums(params, cfg, encoded, batch, rng):
    return mlm.sums({**params, "mlm": params["again"]}, cfg, encoded, batch, rng)


def make_head():
    rows = (
        ("again/transform/kernel", "embed width"),
        ("again/(transform/bias|norm/(scale|bias))", "width"),
        ("again/bias", "vocab"),
    )
    made = mlm.make_head()
    return dataclasses.replace(made, name="again", init=init, sums=sums, shardings=rows)
