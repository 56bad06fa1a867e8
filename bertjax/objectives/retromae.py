# SPDX-License-Identifier: Apache-2.0
"""RetroMAE: train an encoder so that a weak decoder can write the text from its vector.

Xiao et al. 2022 (arXiv 2205.12035), section 3, and staoxiao/RetroMAE,
src/pretrain/modeling.py. The encoder reads the row masked at data.mask_rate and is
trained as a masked LM. The decoder is a single layer of the encoder's shape, used only
in pretraining. It predicts every token by enhanced decoding (section 3.3): with h the
vector of the first token, e the embeddings and p the positions, the queries are H1 and
the keys and values are H2,

    H1 = [h + p_0, ..., h + p_N],    H2 = [h, e_1 + p_1, ..., e_N + p_N].

Query i attends to the first position of H2 and to a subset of the others that is drawn
for i separately, and never contains i. The head over the vocabulary is the masked LM's;
the embeddings are the encoder's. With rotary positions there is no p: each query of H1
is h, and queries and keys are rotated by their positions in the sequence, as in the
encoder's layers that attend to all tokens. Which word a query asks for then shows only
in how it weighs the others by their distance, and not in its own vector.

The subset consists of whole words: each word is hidden independently with probability
decoder_rate. Special tokens are always visible, as in the authors' code. (Their code
hides a fixed number of tokens, with one of up to 256 masks per row.)
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from bertjax import UserError
from bertjax.models import encoder, heads
from bertjax.models.attention_mask import AttentionMask
from bertjax.models.config import EncoderConfig
from bertjax.models.embeddings import embed, rope_angles
from bertjax.models.flops import encoder_flops, flops_per_token, head_flops
from bertjax.models.layer_specs import layer_specs
from bertjax.models.layers import (
    Params,
    Rng,
    count_up,
    draw,
    fold_in,
    linear,
    lookup,
    mix,
    norm_specs,
    take_at,
)
from bertjax.models.stacked_layers import take_layer
from bertjax.models.transformer_layer import (
    MemoryInputs,
    add_attended,
    add_mlp,
    cross_attention,
    normalize,
)
from bertjax.objectives.base import Batch, Objective, Specs, Term
from bertjax.objectives.token_head import PARAMS, score_in_chunks
from bertjax.parallel.sharding import PARAM_AXES, constrain, gather_params

NAME = "retromae"
OWN_KEYS = 2**31 - 1  # folded into the decoder's key: other dropout than the encoder's
SHARDINGS = (
    *(
        (NAME + path[path.index("/layers/") :], axes)
        for path, axes in PARAM_AXES
        if "(en|de)coder/layers/" in path
    ),
    (f"{NAME}/final_norm/(scale|bias)", "width"),
)


def make_objective(
    cfg: EncoderConfig, decoder_rate: float = 0.5, decoder_weight: float = 1.0
) -> tuple[Objective, EncoderConfig]:
    """Add the decoder's loss, `retromae_loss`, to the masked LM's.

    decoder_rate: the probability that a word is hidden from a query of the decoder
    (published: 0.5 to 0.7). decoder_weight: the factor of the decoder's loss. Raises
    UserError for a rate outside (0, 1], a factor that is not positive, and an encoder
    without positions (a table or rotary ones) or with causal attention.
    """
    if not 0 < decoder_rate <= 1 or decoder_weight <= 0:
        raise UserError(
            f"objective: retromae's decoder_rate={decoder_rate} must be a share, more "
            f"than 0 and at most 1, and decoder_weight={decoder_weight} more than 0"
        )
    if cfg.position_embedding_type == "none":
        raise UserError(
            "model.position_embedding_type=none: the decoder of objective=retromae "
            'asks by position: set "absolute" or "rope"'
        )
    if cfg.is_decoder:
        raise UserError(
            "model.is_decoder=True: objective=retromae needs a first token that sees "
            "the text: set model.is_decoder=False"
        )
    cfg = encoder.without_pooler(cfg)
    own = decoder_config(cfg)
    objective = Objective(
        init=functools.partial(init, cfg, own),
        weights=weights,
        sums=functools.partial(sums, cfg, own, decoder_rate),
        needs=frozenset({NAME}),
        coefficients={"mlm_loss": 1.0, f"{NAME}_loss": decoder_weight},
        shardings=SHARDINGS,
        flops=functools.partial(flops, cfg, own),
    )
    return objective, cfg


def decoder_config(cfg: EncoderConfig) -> EncoderConfig:
    """Return the config of the decoder, as an encoder with one layer."""
    return dataclasses.replace(
        cfg,
        num_hidden_layers=1,
        num_hidden_groups=0,
        num_decoder_layers=0,
        local_attention=0,
        global_attn_every_n_layers=0,
        local_rope_theta=0.0,
        first_attention_norm=True,
        embedding_skip=False,
        value_skip=False,
        unet_skips=False,
    )


def init(cfg: EncoderConfig, own: EncoderConfig, rng: jax.Array) -> Params:
    """Make the parameters of the encoder `cfg` and of its decoder `own`."""
    rngs = jax.random.split(rng, 3)
    specs = {"layers": layer_specs(own)}
    if own.norm_position == "pre":
        specs["final_norm"] = norm_specs(own.hidden_size, own.norm_bias)
    params = {
        "encoder": encoder.init(rngs[0], cfg),
        PARAMS: heads.init_mlm(rngs[1], cfg),
        NAME: draw(rngs[2], specs, own.initializer_range),
    }
    return {name: part for name, part in params.items() if part}


def weights(batch: Batch) -> dict[str, jax.Array]:
    """Return the weights of the losses, f32 []: masked tokens, all tokens of text."""
    names = "mlm", NAME
    return {f"{name}_loss": jnp.sum(batch[f"{name}_weights"]) for name in names}


def sums(
    cfg: EncoderConfig,
    own: EncoderConfig,
    rate: float,
    params: Params,
    batch: Batch,
    rng: Rng,
) -> dict[str, Term]:
    """Predict the masked tokens with the encoder, and every token with the decoder."""
    params = gather_params(params, cfg.dtype, SHARDINGS)
    hidden, vectors = encode(params, cfg, batch, rng)
    with jax.named_scope("decoder"):
        seen = draw_visible(batch["retromae_keys"], batch["retromae_words"], rate)
        written = decode(params, own, batch, vectors, seen, fold_in(rng, OWN_KEYS))
    terms: dict[str, Term] = {}
    for name, states in (("mlm", hidden), (NAME, written)):
        arrays = states, batch[f"{name}_ids"], batch[f"{name}_weights"]
        terms |= score_in_chunks(params, cfg, arrays, name)
    return terms


def encode(
    params: Params, cfg: EncoderConfig, batch: Batch, rng: Rng
) -> tuple[jax.Array, jax.Array]:
    """Return the hidden states of the masked tokens, [B, P, D], and sequence vectors.

    A sequence's vector is the hidden state of its first token: [B, 1, D], or, in packed
    rows, [B, L, D] with the vector of each token's sequence.
    """
    at, batch = batch["mlm_positions"], dict(batch)
    if "segment_ids" in batch:
        hidden = encoder.apply(params["encoder"], cfg, batch, rng).hidden
        first = count_up(hidden.shape[1]) - batch["position_ids"]
        return take_at(hidden, at), take_at(hidden, jnp.maximum(first, 0))
    at = jnp.pad(at, ((0, 0), (1, 0)))
    hidden = encoder.apply(params["encoder"], cfg, batch, rng, at).hidden
    return hidden[:, 1:], hidden[:, :1]


def draw_visible(keys: jax.Array, words: jax.Array, rate: float) -> jax.Array:
    """Draw the tokens that each token's query may see: bool [B, L, L].

    keys: i32 [B, 2], a random key per row; words: i32 [B, L], the number of each
    token's word, 0 for special tokens, which all queries see. The tokens of a word are
    visible or hidden together, except that no token of text sees itself. Padding and
    other sequences are not masked here. The draw hashes key, query and word, so it is
    the same on any mesh.
    """
    keys = keys.astype(jnp.uint32)[:, :, None, None]
    query = jnp.arange(words.shape[1], dtype=jnp.uint32)[:, None]
    word = mix(words.astype(jnp.uint32)[:, None] + keys[:, 1])
    bits = mix(mix(query ^ keys[:, 0]) + keys[:, 1] ^ word)
    hide = np.uint32(min(round(rate * 2**32), 2**32 - 1))
    own = np.eye(words.shape[1], dtype=bool)
    return (words[:, None] == 0) | ((bits >= hide) & ~own)


def decode(
    params: Params,
    cfg: EncoderConfig,
    batch: Batch,
    vectors: jax.Array,
    visible: jax.Array,
    rng: Rng,
) -> jax.Array:
    """Run the decoder: hidden [B, L, D], to predict each token.

    params: the whole tree; cfg: the decoder's; vectors: from `encode`; visible: from
    `draw_visible`. A query sees only its own sequence.
    """
    rngs = (None, None, None) if rng is None else jax.random.split(rng, 3)
    embeddings = params["encoder"]["embeddings"]
    given = {**batch, "input_ids": batch["retromae_ids"]}
    # split(rng)[i] is fold_in(rng, i), and embed also folds a small number into its
    # key: a separate key avoids using the same one twice.
    text = embed(embeddings, cfg, given, fold_in(rng, OWN_KEYS))
    b, length, d = text.shape
    places = batch.get("position_ids", count_up(length)[None])
    text = jnp.where((places == 0)[..., None], vectors, text)
    x, rope = vectors, None
    if cfg.position_embedding_type == "rope":
        rope = rope_angles(places, cfg.head_dim, cfg.rope_theta)
    else:
        position = lookup(embeddings["position"], places + cfg.position_offset)
        if cfg.embedding_size:
            position = linear(embeddings["projection"], position.astype(cfg.dtype))
        x = (x + position).astype(cfg.dtype)
    x = constrain(jnp.broadcast_to(x, text.shape), "batch length embed")
    x = x.reshape(-1, d)
    layer = take_layer(params[NAME]["layers"], 0, 1)
    p = layer["attention"]
    pre = cfg.norm_position == "pre"
    keys = normalize(p["norm"], cfg, text) if pre else text
    packed = "segment_ids" in batch
    real = batch["segment_ids" if packed else "attention_mask"]
    mask = AttentionMask(real, packed, edges=visible)
    y, _ = cross_attention(p, cfg, x, b, MemoryInputs(mask, keys, rope), rngs[0], None)
    x = add_attended(p, cfg, x, y, rngs[1])
    x = add_mlp(layer["mlp"], cfg, x, rngs[2])
    x = normalize(params[NAME]["final_norm"], cfg, x) if pre else x
    return x.reshape(b, length, d)


def flops(cfg: EncoderConfig, own: EncoderConfig, specs: Specs) -> float:
    """Count the FLOPs per token slot of the encoder, the decoder and the head, which
    runs at masked tokens for the encoder and at every token for the decoder."""
    length, predictions = (specs[k].shape[-1] for k in ("input_ids", "mlm_ids"))
    packed = "segment_ids" in specs
    whole = flops_per_token(cfg, length, predictions, everywhere=packed)
    return whole + encoder_flops(own, length, 0) + head_flops(cfg, length, length)
