# SPDX-License-Identifier: Apache-2.0
"""Denoise a corrupted text with an encoder and a decoder.

T5 (Raffel et al. 2020, section 3.1.4), BART (Lewis et al. 2020, section 2), UL2 (Tay et
al. 2022).
"""

import functools

import jax
import jax.numpy as jnp

from bertjax import UserError, registry
from bertjax.models import decoder, encoder, heads
from bertjax.models.config import EncoderConfig
from bertjax.models.flops import decoder_flops, encoder_flops, head_flops
from bertjax.models.layers import Params, Rng
from bertjax.objectives.base import Batch, Objective, Specs, Term
from bertjax.objectives.token_head import PARAMS, score_in_chunks
from bertjax.parallel.sharding import gather_params

TARGETS = {"text": "noise", "spans": "spans:density={density},mean={mean}"}
LAW = {"density": "0.15", "mean": "3"}  # T5's


def make_objective(
    cfg: EncoderConfig,
    target: str = "text",
    density: str = LAW["density"],
    mean: str = LAW["mean"],
    z_loss: float = 0.0,
) -> tuple[Objective, EncoderConfig]:
    """Train an encoder to read a corrupted text, and a decoder to write the original.

    target: what the decoder writes: the whole `text`, corrupted by data.noise
    (data/features/noise.py); or only the masked `spans`, of the given density and mean
    length (data/features/spans.py); or the dotted name of other features that make the
    same arrays. z_loss: see `make_token_head`.
    Raises UserError without a decoder, and for options that the target does not use.
    """
    if z_loss < 0:
        raise UserError(f"objective: denoise's z_loss={z_loss} must be 0 or more")
    if not cfg.num_decoder_layers:
        raise UserError(
            "objective=denoise needs a decoder: take a model that has one, such as "
            "model.family=t5 or bart, or give model.num_decoder_layers"
        )
    law, needs = {"density": density, "mean": mean}, target
    if not registry.is_outside(target):
        needs = registry.pick("objective: denoise's target", target, TARGETS)
        needs = needs.format(**law)
    if target != "spans" and law != LAW:
        name = next(name for name in law if law[name] != LAW[name])
        raise UserError(
            f"objective: denoise's {name}={law[name]} needs target=spans: leave it "
            "out, or give data.noise"
        )
    cfg = encoder.without_pooler(cfg)
    objective = Objective(
        init=functools.partial(init, cfg),
        weights=functools.partial(weights, z_loss=z_loss),
        sums=functools.partial(sums, cfg, z_loss),
        needs=frozenset({needs}),
        coefficients={"denoise_z_loss": z_loss} if z_loss else {},
        flops=functools.partial(flops, cfg),
    )
    return objective, cfg


def init(cfg: EncoderConfig, rng: jax.Array) -> Params:
    """Make the parameters of the encoder, the decoder and the head, if it has any."""
    rngs = jax.random.split(rng, 3)
    params = {
        "encoder": encoder.init(rngs[0], cfg),
        "decoder": decoder.init(rngs[1], cfg),
    }
    if head := heads.init_mlm(rngs[2], cfg):
        params[PARAMS] = head
    return params


def weights(batch: Batch, z_loss: float = 0.0) -> dict[str, jax.Array]:
    """Return the weights of the losses: the number of target tokens, f32 []."""
    terms = ["denoise_loss", *["denoise_z_loss"] * (z_loss > 0)]
    return dict.fromkeys(terms, jnp.sum(batch["lm_weights"]))


def sums(
    cfg: EncoderConfig, z_loss: float, params: Params, batch: Batch, rng: Rng
) -> dict[str, Term]:
    """Encode the input, and predict each token of the target from those before it."""
    params = gather_params(params, cfg.dtype)
    batch = dict(batch)
    memory = decoder.encode(params, cfg, batch, rng)
    hidden = decoder.apply(params, cfg, batch, memory, rng)
    arrays = hidden, batch["lm_ids"], batch["lm_weights"]
    return score_in_chunks(params, cfg, arrays, "denoise", z_loss)


def flops(cfg: EncoderConfig, specs: Specs) -> float:
    """Count the FLOPs of both stacks and the head, per slot of the input."""
    read, written = (specs[k].shape[-1] for k in ("input_ids", "decoder_input_ids"))
    own = decoder_flops(cfg, written, read) * written / read
    return encoder_flops(cfg, read, 0) + own + head_flops(cfg, read, written)
