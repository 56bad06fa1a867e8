# SPDX-License-Identifier: Apache-2.0
"""Distill a larger masked LM into a smaller one, at every token (DistilBERT).

Sanh et al. 2019, arXiv 1910.01108, section 2, and huggingface/transformers,
examples/research_projects/distillation/distiller.py. To use with `mlm`: "mlm+distil".
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from bertjax import UserError
from bertjax.models import heads
from bertjax.models.config import EncoderConfig
from bertjax.models.encoder import Encoded
from bertjax.models.flops import head_flops
from bertjax.models.layers import Params, Rng
from bertjax.objectives.base import EVERYWHERE, Batch, Head, Sum
from bertjax.objectives.losses import cosine_distance, kl_divergence
from bertjax.objectives.piecewise_gradient import add_pieces
from bertjax.objectives.task_head import real_tokens
from bertjax.objectives.teacher import Teacher
from bertjax.objectives.token_head import PARAMS, count_chunks
from bertjax.parallel.sharding import TEACHER

# The limit in MB of the student's logits per piece, if model.max_logits_mb is 0. Both
# models need logits at all tokens; a masked LM alone needs them at about a seventh.
MOST_MB = 64


def make_head(
    temperature: float = 2.0,
    kl: float = 2.5,
    cosine: float = 0.5,
    teacher: Teacher | None = None,
) -> Head:
    """Make the head of two of DistilBERT's three losses; `mlm` is the third.

    kl_loss: T^2 KL(teacher || student) of the distributions over the vocabulary at
    temperature T, the mean over all real tokens. cosine_loss: 1 minus the cosine of the
    hidden states after the last layers. kl, cosine: their factors if the masked LM's is
    1 (published: 5, 1 and 2 for the masked LM); 0 leaves a loss out. With kl=0 neither
    model's head over the vocabulary is used. Raises UserError for a temperature that is
    not positive, factors below 0, or both factors 0.
    """
    if temperature <= 0 or kl < 0 or cosine < 0 or not kl + cosine:
        raise UserError(
            f"objective: distil's temperature={temperature} must be more than 0, its "
            f"kl={kl} and cosine={cosine} 0 or more and not both 0"
        )
    teacher = teacher and teacher.pooled(False)
    coefficients = {"kl_loss": kl, "cosine_loss": cosine}
    terms = {k: weight for k, weight in coefficients.items() if weight and teacher}

    def weights(batch: Batch) -> dict[str, jax.Array]:
        return dict.fromkeys(terms, jnp.sum(real_tokens(batch)))

    def sums(
        params: Params, cfg: EncoderConfig, encoded: Encoded, batch: Batch, rng: Rng
    ) -> dict[str, Sum]:
        if teacher is None:
            return {}
        found, real = {}, real_tokens(batch)
        theirs = teacher.encode(params, batch).hidden
        if kl:
            models = (cfg, params), (teacher.cfg, params[TEACHER])
            arrays = encoded.hidden, theirs, real
            found["kl_loss"] = logits_divergence(models, arrays, temperature)
        if cosine:
            check_widths(cfg, teacher.cfg)
            found["cosine_loss"] = cosine_distance(encoded.hidden, theirs, real)
        return found

    def flops(cfg: EncoderConfig, length: int, predictions: int) -> float:
        if teacher is None:
            return 0.0
        theirs = head_flops(teacher.cfg, length, length) / 3
        own = head_flops(cfg, length, length)
        return teacher.flops(length) + bool(kl) * (own + theirs)

    init_teacher = None
    if teacher is not None:
        whole = functools.partial(teacher.init, mlm=heads.init_mlm)
        init_teacher = whole if kl else teacher.init
    return Head(
        "distil",
        heads.init_mlm if kl else lambda rng, cfg: {},
        weights,
        sums,
        reads=EVERYWHERE,
        params=PARAMS if kl else "",
        coefficients=terms,
        flops=flops,
        needs_teacher=True,
        init_teacher=init_teacher,
    )


def check_widths(cfg: EncoderConfig, theirs: EncoderConfig) -> None:
    """Raise UserError if hidden states of teacher and student differ in width."""
    if cfg.hidden_size != theirs.hidden_size:
        raise UserError(
            f"objective: distil compares hidden states, and the teacher's are "
            f"{theirs.hidden_size} wide, the student's {cfg.hidden_size}: give "
            "mlm+distil:cosine=0"
        )


def logits_divergence(
    models: tuple[tuple[EncoderConfig, Params], ...],
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    temperature: float,
) -> Sum:
    """Sum kl_divergence over tokens, computing the logits piece by piece.

    models: config and parameters {"encoder", "mlm"} of the student, then the teacher;
    arrays: hidden states [B, L, D] of the student and of the teacher, and weights f32
    [B, L].
    """
    own, theirs = (cfg for cfg, _ in models)
    # Leave out the padding rows of both embedding tables.
    pieces = min(cfg.pieces or cfg.vocab_size for cfg in (own, theirs))

    def logits(cfg: EncoderConfig, params: Params, hidden: jax.Array) -> jax.Array:
        whole = heads.mlm_logits(params[PARAMS], params["word"], cfg, hidden)
        return whole[..., :pieces]

    def score(
        mine: Params, known: Params, *piece: jax.Array
    ) -> tuple[jax.Array, tuple[()]]:
        hidden, states, weights = piece
        student, teacher = logits(own, mine, hidden), logits(theirs, known, states)
        with jax.named_scope("kl_loss"):
            return kl_divergence(student, teacher, weights, temperature).value, ()

    heads_of = [
        {PARAMS: tree.get(PARAMS, {}), "word": tree["encoder"]["embeddings"]["word"]}
        for _, tree in models
    ]
    limit = dataclasses.replace(own, max_logits_mb=own.max_logits_mb or MOST_MB)
    count = count_chunks(limit, *arrays[-1].shape)
    return Sum(add_pieces(score, count, *heads_of, arrays)[0], jnp.sum(arrays[-1]))
