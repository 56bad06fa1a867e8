# SPDX-License-Identifier: Apache-2.0
"""Another model from which an objective learns: its config, its forward pass.

A module whose make_head or make_objective has an argument `teacher` is given a Teacher,
or None where there is none: before one is opened, and once the model is trained. What
the head then reads is `params["teacher"]`, which no gradient and no optimizer sees
(training/state.py).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from bertjax import UserError
from bertjax.models import encoder
from bertjax.models.config import EncoderConfig
from bertjax.models.flops import encoder_flops
from bertjax.models.layers import Params
from bertjax.objectives.base import Batch, Sum
from bertjax.parallel.sharding import TEACHER

SoftLoss = Callable[[jax.Array, jax.Array, Batch, float], Sum]


@dataclasses.dataclass(frozen=True)
class Soft:
    """What a task's head learns of a teacher that knows the task (soft labels).

    loss(student's logits, teacher's, batch, temperature) -> Sum, the term
    NAME_kl_loss. weight: of that term; the labels have the rest, 1 - weight (Hinton et
    al. 2015, arXiv 1503.02531, section 2). Raises UserError for a weight that is no
    share and a temperature of 0 or less.
    """

    teacher: "Teacher | None"
    loss: SoftLoss
    weight: float
    temperature: float

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1 or self.temperature <= 0:
            raise UserError(
                f"objective: teacher_weight={self.weight} must be a share, more than 0 "
                f"and at most 1, and teacher_temperature={self.temperature} more than 0"
            )

    def coefficients(self, name: str) -> dict[str, float]:
        """Return the weights of a head's two terms; {} without a teacher."""
        if self.teacher is None:
            return {}
        return {f"{name}_loss": 1 - self.weight, f"{name}_kl_loss": self.weight}


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
        heads = {name: make(rng, self.cfg) for name, make in own.items()}
        return params | {name: part for name, part in heads.items() if part}

    def encode(self, params: Params, batch: Batch, depths: tuple[int, ...] = ()) -> Any:
        """Encode a batch without dropout, as encoder.apply does; params: the whole tree
        of a step."""
        own = params[TEACHER]["encoder"]
        with jax.named_scope("teacher"):
            return encoder.apply(own, self.cfg, batch, depths=depths)

    def pooled(self, is_pooled: bool) -> "Teacher":
        """Return it with or without a vector of the whole text."""
        return Teacher(dataclasses.replace(self.cfg, pooler=is_pooled))

    def flops(self, length: int) -> float:
        """Count its forward pass, per token slot: a third of a step's."""
        return encoder_flops(self.cfg, length, 0) / 3

    def head_flops(self, cfg: EncoderConfig, length: int, predictions: int) -> float:
        """Count what it adds to a student's step, as Head.flops does."""
        return self.flops(length)
