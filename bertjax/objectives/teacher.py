# SPDX-License-Identifier: Apache-2.0
"""Another model from which an objective learns: its config, its forward pass.

A module whose make_head or make_objective has an argument `teacher` is given a Teacher,
or None where there is none: before one is opened, and once the model is trained. What
the head then reads is `params["teacher"]`, which no gradient and no optimizer sees
(training/state.py).
"""

import dataclasses
from collections.abc import Callable

import jax

from bertjax.models import encoder, heads
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import Encoded
from bertjax.models.flops import encoder_flops
from bertjax.models.layers import Params
from bertjax.objectives.base import Batch
from bertjax.parallel.sharding import TEACHER


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A teacher: the config of its encoder, which computes as its student's does."""

    cfg: EncoderConfig

    def init(
        self, rng: jax.Array, **own: Callable[[jax.Array, EncoderConfig], Params]
    ) -> Params:
        """Make parameters of its form: the encoder, and what `own` makes by name.

        Of those of a run it says shapes and dtypes alone.
        """
        params = {"encoder": encoder.init(rng, self.cfg)}
        made = {name: make(rng, self.cfg) for name, make in own.items()}
        return params | {name: part for name, part in made.items() if part}

    def encode(self, params: Params, batch: Batch) -> Encoded:
        """Encode a batch without dropout; params: the whole tree of a step."""
        with jax.named_scope("teacher"):
            return encoder.apply(params[TEACHER]["encoder"], self.cfg, batch)

    def flops(self, length: int) -> float:
        """Count its forward pass, per token slot: a third of a step's."""
        return encoder_flops(self.cfg, length, 0) / 3


def init_mlm_teacher(teacher: Teacher, rng: jax.Array) -> Params:
    """Make parameters of a masked LM's form."""
    return teacher.init(rng, mlm=heads.init_mlm)
