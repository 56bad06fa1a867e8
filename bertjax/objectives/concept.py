# SPDX-License-Identifier: Apache-2.0
"""Unlearn a concept: a head learns to detect its words, the encoder to hide them.

Feder et al. 2021 (CausaLM, arXiv 2005.13407, section 3), by gradient reversal (Ganin
and Lempitsky 2015, arXiv 1409.7495). `gamma` is the schedule of the latter; CausaLM's
released code has no schedule. data.concept says which words belong to the concept; the
host makes the labels.
"""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from bertjax import UserError, registry
from bertjax.models import heads
from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Params, Rng, fold_in, reverse_gradient
from bertjax.models.pooling import means
from bertjax.objectives.base import EVERYWHERE, Batch, Head
from bertjax.objectives.metrics import loss_and_accuracy
from bertjax.objectives.task_head import KEY, row_weights

# What the labels are for -> where the head reads (Head.reads).
OF = {"words": "mlm_positions", "texts": EVERYWHERE}


def reversal_strength(batch: Batch, alpha: float, gamma: float) -> jax.Array:
    """Return the factor of the reversed gradients, f32 [B].

    It is alpha (2 / (1 + exp(-gamma p)) - 1), where p is the completed share of the
    phase (`phase_progress` f32 [B]). So it is 0 at first, when the head has learned
    nothing; with gamma 0 it is always alpha. (Ganin and Lempitsky 2015, section 4:
    alpha 1, gamma 10.)
    """
    p = batch["phase_progress"]
    if not gamma:
        return jnp.full_like(p, alpha)
    return alpha * (2 / (1 + jnp.exp(-gamma * p)) - 1)


def make_label_head(
    name: str, of: str, weight: float, reverse: tuple[float, float] | None = None
) -> Head:
    """Make a head that predicts the labels `<name>_labels` or `<name>_texts` (0 or 1).

    of: a key of OF. "words": labels i32 [B, P], predicted from the hidden states at the
    predicted positions; "texts": labels i32 [B] ([B, S] in packed rows), predicted from
    the mean hidden state of a text. reverse: alpha and gamma of `reversal_strength`;
    None: gradients are not reversed, so the encoder helps the head. weight: the loss's
    factor. Raises UserError for numbers below 0 and an unknown `of`.
    """
    reads = registry.pick(f"objective: {name}:of", of, OF)
    if weight < 0 or min(reverse or (0,)) < 0:
        raise UserError(f"objective: {name}: weight, alpha and gamma must be 0 or more")

    def own(cfg: EncoderConfig) -> EncoderConfig:
        # A hidden layer before the classes: hiding the concept from a linear head
        # would not hide it from others.
        return dataclasses.replace(cfg, task_transform=True)

    def weigh(batch: Batch) -> jax.Array:
        if of == "texts":
            rows = row_weights(batch)
            packed = "cls_positions" in batch
            return rows[:, None] * batch["cls_weights"] if packed else rows
        weights = batch["mlm_weights"]
        if name == "control" and "concept_labels" in batch:
            # Words of the concept would make the control head learn the concept.
            return weights * (1 - batch["concept_labels"])
        return weights

    def sums(
        params: Params, cfg: EncoderConfig, encoded: Any, batch: Batch, rng: Rng
    ) -> dict[str, Any]:
        labels = batch[f"{name}_{'labels' if of == 'words' else of}"]
        x = encoded.hidden if of == "words" else means(encoded.hidden, batch)
        if reverse:
            x = reverse_gradient(x, reversal_strength(batch, *reverse))
        # Each head draws its own dropout.
        rng = fold_in(rng, KEY + zlib.crc32(name.encode()) % KEY)
        args = heads.task_logits(params[name], own(cfg), x, rng), labels, weigh(batch)
        return loss_and_accuracy(name, *args)

    return Head(
        name,
        lambda rng, cfg: heads.init_task(rng, own(cfg)),
        lambda batch: {f"{name}_loss": jnp.sum(weigh(batch))},
        sums,
        reads,
        needs=frozenset({"mlm"}),
        coefficients={f"{name}_loss": weight},
        shardings=heads.task_shardings(name),
    )


def make_head(
    of: str = "words", alpha: float = 1.0, gamma: float = 10.0, weight: float = 1.0
) -> Head:
    return make_label_head("concept", of, weight, (alpha, gamma))
