# SPDX-License-Identifier: Apache-2.0
"""Replaced-token detection (Clark et al. 2020, ELECTRA, section 2).

A small generator samples a token for each masked position. The discriminator,
params["encoder"], predicts at every position whether the token was replaced. The
generator learns only from its masked-LM loss: no gradient flows through the samples.
Both models share the embeddings, which are in params["encoder"].
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

from bertjax import UserError
from bertjax.models import encoder, heads
from bertjax.models.config import EncoderConfig, generator_config
from bertjax.models.flops import flops_per_token
from bertjax.models.layers import Params, Rng
from bertjax.objectives.base import Batch, Objective, Specs, Term, row_keys
from bertjax.objectives.losses import binary_cross_entropy
from bertjax.objectives.metrics import binary_metrics
from bertjax.objectives.task_head import real_tokens
from bertjax.objectives.token_head import score_tokens, sum_in_chunks
from bertjax.parallel.sharding import PARAM_AXES, gather_params

SHARED = ("word", "position", "token_type", "streams", "norm")
# The generator is sharded like an encoder.
SHARDINGS = (
    *(
        ("generator" + path[path.index("/layers/") :], axes)
        for path, axes in PARAM_AXES
        if "coder/layers/" in path
    ),
    ("generator/embeddings/projection/kernel", "embed width"),
    ("generator/(embeddings/projection/bias|final_norm/(scale|bias))", "width"),
)


def make_objective(
    cfg: EncoderConfig,
    generator: float = 0.25,
    generator_weight: float = 1.0,
    discriminator_weight: float = 50.0,
) -> tuple[Objective, EncoderConfig]:
    """Build the objective with the discriminator `cfg`.

    generator: the generator's width as a share of the discriminator's.
    generator_weight, discriminator_weight: the factors of the two losses. Raises
    UserError for a share outside (0, 1], a width that the heads do not divide, factors
    below 0, and a decoder.
    """
    if cfg.is_decoder:
        raise UserError(
            "model.is_decoder=True: both models of electra see what stands behind a "
            "token: set model.is_decoder=False"
        )
    if not 0 < generator <= 1:
        raise UserError(f"objective: electra's generator={generator} is not in (0, 1]")
    if min(generator_weight, discriminator_weight) < 0:
        raise UserError(
            f"objective: electra's generator_weight={generator_weight} and "
            f"discriminator_weight={discriminator_weight} must be 0 or more"
        )
    cfg = encoder.without_pooler(cfg)
    small = generator_config(cfg, round(cfg.hidden_size * generator))

    objective = Objective(
        init=functools.partial(init, cfg, small),
        weights=weights,
        sums=functools.partial(sums, cfg, small),
        needs=frozenset({"mlm"}),
        coefficients={"mlm_loss": generator_weight, "rtd_loss": discriminator_weight},
        shardings=SHARDINGS,
        flops=functools.partial(flops, cfg, small),
    )
    return objective, cfg


def init(cfg: EncoderConfig, small: EncoderConfig, rng: jax.Array) -> Params:
    """Make the parameters of the discriminator `cfg` and its generator `small`."""
    rngs = jax.random.split(rng, 4)
    own = encoder.init(rngs[1], small)
    own["embeddings"] = {k: v for k, v in own["embeddings"].items() if k not in SHARED}
    return {
        "encoder": encoder.init(rngs[0], cfg),
        "generator": {k: v for k, v in own.items() if v},
        "mlm": heads.init_mlm(rngs[2], small),
        "rtd": heads.init_rtd(rngs[3], cfg),
    }


def sums(
    cfg: EncoderConfig, small: EncoderConfig, params: Params, batch: Batch, rng: Rng
) -> dict[str, Term]:
    """Fill the masked positions, and predict which of the tokens were replaced."""
    params = gather_params(params, cfg.dtype, SHARDINGS)
    rngs = (None, None) if rng is None else jax.random.split(rng)
    mlm, at = generator_lm(params), batch["mlm_positions"]
    with jax.named_scope("generator"):
        hidden = encoder.apply(mlm["encoder"], small, batch, rngs[0], at).hidden

    def guess(first, *arrays):
        with jax.named_scope("generator"):
            terms, logits = score_tokens(mlm, small, *arrays)
        with jax.named_scope("sample"):
            return terms, sample(logits, batch, first)

    arrays = hidden, batch["mlm_ids"], batch["mlm_weights"]
    terms, drawn = sum_in_chunks(guess, small, arrays)
    with jax.named_scope("sample"):
        ids, replaced = replace_tokens(batch, drawn)
    with jax.named_scope("discriminator"):
        filled = {**batch, "input_ids": ids}
        hidden = encoder.apply(params["encoder"], cfg, filled, rngs[1]).hidden
        logits = heads.rtd_logits(params["rtd"], cfg, hidden)
        args = logits, replaced, real_tokens(batch)
        own = {"loss": binary_cross_entropy(*args), **binary_metrics(*args)}
    return {**terms, **{f"rtd_{name}": term for name, term in own.items()}}


def flops(cfg: EncoderConfig, small: EncoderConfig, specs: Specs) -> float:
    """Count the FLOPs per token slot of both models; the discriminator's head runs at
    every token."""
    d = cfg.hidden_size
    length, predictions = (specs[k].shape[-1] for k in ("input_ids", "mlm_ids"))
    generator = flops_per_token(small, length, predictions, everywhere=False)
    return generator + flops_per_token(cfg, length, 0) + 6.0 * (d * d + d)


def generator_lm(params: Params) -> Params:
    """Return the generator as a masked LM: {"encoder", "mlm"}, embeddings included."""
    own = params["generator"]
    shared = params["encoder"]["embeddings"]
    embeddings = {k: shared[k] for k in SHARED if k in shared}
    embeddings |= own.get("embeddings", {})
    return {"encoder": {**own, "embeddings": embeddings}, "mlm": params["mlm"]}


def split_pair(
    params: Params, cfg: EncoderConfig
) -> dict[str, tuple[Params, EncoderConfig]]:
    """Split trained parameters (jax or numpy arrays) into two separate models.

    cfg: the discriminator's. Returns {"generator": ({"encoder", "mlm"}, its config),
    "discriminator": ({"encoder", "rtd"}, cfg)}; both contain the embeddings.
    """
    width = params["generator"]["layers"]["mlp"]["up"]["kernel"].shape[1]
    cfg = encoder.without_pooler(cfg)
    rest = {k: params[k] for k in ("encoder", "rtd")}
    return {
        "generator": (generator_lm(params), generator_config(cfg, width)),
        "discriminator": (rest, cfg),
    }


def weights(batch: Batch) -> dict[str, jax.Array]:
    """Return the weights of the losses: predicted positions and real tokens, f32 []."""
    return {
        "mlm_loss": jnp.sum(batch["mlm_weights"]),
        "rtd_loss": jnp.sum(real_tokens(batch)),
    }


def sample(
    logits: jax.Array, batch: Batch, first: jax.Array | None = None
) -> jax.Array:
    """Draw tokens from softmax(logits [B, P, V]): i32 [B, P], without gradient.

    The sample is the token with the largest sum of logit and Gumbel noise (Gumbel
    1954). The noise is a function of the row and its original tokens (`row_keys`).
    first: if the logits are of only some slots, [B, w, V], the number of the first of
    these slots; a slot's noise is the same as if all slots were drawn together.
    """

    def draw(key: jax.Array) -> jax.Array:
        if first is None:
            return jax.random.bits(key, logits.shape[1:], jnp.uint32)
        # The rows `first` to `first` + w of jax.random.bits for all slots, [P, V].
        # jax.random cannot compute only a part. Each value hashes its index as two
        # words; the upper word is 0 for less than 2^32 values. One key per slot would
        # draw other tokens than earlier versions did, and than a device that has room
        # for all logits.
        w, v = logits.shape[1:]
        at = first.astype(jnp.uint32) + jnp.arange(w, dtype=jnp.uint32)
        index = (at[:, None] * v + jnp.arange(v, dtype=jnp.uint32)).ravel()
        counts = jnp.concatenate([jnp.zeros_like(index), index])
        upper, lower = jnp.split(threefry_2x32(jax.random.key_data(key), counts), 2)
        return (upper ^ lower).reshape(w, v)

    # 23 random bits plus a half: never 0 and never 1.
    keys = row_keys(batch, "input_ids", "mlm_positions", "mlm_ids")
    uniform = ((jax.vmap(draw)(keys) >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    scores = jax.lax.stop_gradient(logits) - jnp.log(-jnp.log(uniform))
    # Find the maximum's index in two steps; argmax and jax.random.gumbel take twice as
    # long.
    best = scores >= jnp.max(scores, axis=-1, keepdims=True)
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(best, ids, ids[-1]), axis=-1)


def replace_tokens(batch: Batch, sampled: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Write sampled i32 [B, P] at mlm_positions, except for unused slots (weight 0).

    Returns (input_ids i32 [B, L], bool [B, L]: whether the token was replaced). A
    sample equal to the original is not a replacement. A position that was drawn twice
    has one slot, of weight 2.

    [CLS] a [MASK] c [SEP], original b: sample x gives [CLS] a x c [SEP], with True at
    x; sample b gives [CLS] a b c [SEP], all False.
    """
    length = batch["input_ids"].shape[1]
    used = batch["mlm_weights"] > 0
    at = jnp.where(used, batch["mlm_positions"], length)

    def put(row: jax.Array, at: jax.Array, values: jax.Array) -> jax.Array:
        return row.at[at].set(values, mode="drop")

    ids = jax.vmap(put)(batch["input_ids"], at, sampled)
    none = jnp.zeros_like(batch["input_ids"], dtype=bool)
    return ids, jax.vmap(put)(none, at, sampled != batch["mlm_ids"])
