# SPDX-License-Identifier: Apache-2.0
"""The masked LM under another name; its terms have the same names as those of mlm."""

import dataclasses

from bertjax.models import heads
from bertjax.objectives import mlm


def init(rng, cfg):
    return heads.init_mlm(rng, cfg)


def sums(params, cfg, encoded, batch, rng):
    params = {**params, "mlm": params["again"]}
    return mlm.make_head().sums(params, cfg, encoded, batch, rng)


def make_head():
    rows = (
        ("again/transform/kernel", "embed width"),
        ("again/(transform/bias|norm/(scale|bias))", "width"),
        ("again/bias", "vocab"),
    )
    made = mlm.make_head()
    own = dict(name="again", params="", init=init, sums=sums, shardings=rows)
    return dataclasses.replace(made, **own)
