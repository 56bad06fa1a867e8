# SPDX-License-Identifier: Apache-2.0
"""The teacher of knowledge distillation: its config and its forward pass.

A module whose make_head or make_objective has an argument `teacher` receives a Teacher,
or None if there is none: before the teacher is opened, and after training. The
teacher's parameters are `params["teacher"]`; they have no gradient and are not given to
the optimizer (training/state.py).
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
    """The loss of a task's head against a teacher that was trained on the task.

    loss(student's logits, teacher's, batch, temperature) -> Sum, the term NAME_kl_loss.
    weight: the factor of this term; the factor of the labels' term is 1 - weight
    (Hinton et al. 2015, arXiv 1503.02531, section 2). Raises UserError for a weight
    outside (0, 1] and a temperature that is not positive.
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
        """Return the factors of a head's two terms; {} without a teacher."""
        if self.teacher is None:
            return {}
        return {f"{name}_loss": 1 - self.weight, f"{name}_kl_loss": self.weight}


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A teacher: the config of its encoder, with the student's runtime settings."""

    cfg: EncoderConfig

    def init(
        self, rng: jax.Array, **own: Callable[[jax.Array, EncoderConfig], Params]
    ) -> Params:
        """Make parameters: the encoder's, and those that `own` makes, by name.

        A run uses only their shapes and dtypes; the values come from the teacher.
        """
        params = {"encoder": encoder.init(rng, self.cfg)}
        heads = {name: make(rng, self.cfg) for name, make in own.items()}
        return params | {name: part for name, part in heads.items() if part}

    def encode(self, params: Params, batch: Batch, depths: tuple[int, ...] = ()) -> Any:
        """Encode a batch without dropout; params: the whole tree of a step.

        Returns the result of encoder.apply.
        """
        own = params[TEACHER]["encoder"]
        with jax.named_scope("teacher"):
            return encoder.apply(own, self.cfg, batch, depths=depths)

    def pooled(self, is_pooled: bool) -> "Teacher":
        """Return the teacher with or without a pooler."""
        return Teacher(dataclasses.replace(self.cfg, pooler=is_pooled))

    def flops(self, length: int) -> float:
        """Count the FLOPs of the forward pass per token slot, a third of a step's."""
        return encoder_flops(self.cfg, length, 0) / 3

    def head_flops(self, cfg: EncoderConfig, length: int, predictions: int) -> float:
        """Count the FLOPs that it adds to a student's step; a Head.flops."""
        return self.flops(length)
