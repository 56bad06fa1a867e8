# SPDX-License-Identifier: Apache-2.0
"""The encoder of BERT (Devlin et al. 2019, section 3) and of its relatives.

The relatives differ by switches of EncoderConfig; bertjax/models/families.py lists the
switches of each family.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bertjax.models.config import EncoderConfig, read_id_streams
from bertjax.models.embeddings import embed
from bertjax.models.initializers import draw_params
from bertjax.models.layer_specs import layer_specs, position_specs
from bertjax.models.layers import Params, Rng, linear_specs, norm_specs
from bertjax.models.pooling import last_positions, pool
from bertjax.models.stacked_layers import run_layers
from bertjax.models.transformer_layer import make_attention_inputs, normalize


class Encoded(NamedTuple):
    """Input of heads: hidden [B, L, D]; pooled [B, D], packed [B, S, D], or None."""

    hidden: jax.Array
    pooled: jax.Array | None


class EncodedInside(NamedTuple):
    """The input of heads that read inner layers: an Encoded, and the inputs of the
    requested layers, `inner`, [B, L, D] each."""

    hidden: jax.Array
    pooled: jax.Array | None
    inner: tuple[jax.Array, ...]


class EncodedNowhere(NamedTuple):
    """The input of heads that read no token's vector: `hidden` raises ValueError."""

    pooled: jax.Array | None
    inner: tuple[jax.Array, ...] = ()

    @property
    def hidden(self) -> jax.Array:
        raise ValueError(
            'a head that says reads="nowhere" reads encoded.hidden: give its Head '
            'reads="everywhere", or the array of positions where it reads'
        )


def init(rng: jax.Array, cfg: EncoderConfig) -> Params:
    """Initialize the parameters: f32; truncated normal, biases 0, norm scales 1.

    The deviation is cfg.initializer_range (0.02 in BERT), or with cfg.fan_in_init by
    the fan-in of each product (initializers.py). With cfg.zero_init_outputs the output
    of each block begins as 0, as in modded-nanogpt and, by a factor, in Goyal et al.
    2017 (arXiv 1706.02677), 5.1.

    Leaves of the layers are stacked on axis 0, [N, ...]. If layers share parameters,
    each set is stored once. A leaf that the first layer lacks is stacked over the
    others.
    """
    d, e = cfg.hidden_size, cfg.embedding_width
    embeddings: dict[str, Any] = {"word": ((cfg.vocab_size, e), "normal")}
    embeddings |= position_specs(cfg)
    if cfg.type_vocab_size:
        embeddings["token_type"] = ((cfg.type_vocab_size, e), "normal")
    if streams := read_id_streams(cfg.id_streams):
        embeddings["streams"] = {
            name: ((rows, e), "normal") for name, rows in streams.items()
        }
    if cfg.embedding_size:
        embeddings["projection"] = linear_specs((e,), (d,))
    specs = {"embeddings": embeddings, "layers": layer_specs(cfg)}
    if cfg.final_norm:
        specs["final_norm"] = norm_specs(d, cfg.norm_bias)
    if cfg.pooler and cfg.pooler_activation:
        specs["pooler"] = linear_specs((d,), (d,))
    return draw_params(rng, specs, cfg)


def apply(
    params: Params,
    cfg: EncoderConfig,
    batch: dict[str, jax.Array],
    rng: Rng = None,
    at: jax.Array | None = None,
    inputs: jax.Array | None = None,
    depths: tuple[int, ...] = (),
) -> Any:
    """Encode a batch; `rng=None` means evaluation (no dropout).

    batch: input_ids, attention_mask (1 = real) i32 [B, L]; optional token_type_ids
    and position_ids i32 [B, L], and {name}_ids i32 [B, L] of cfg.id_streams. Packed
    rows have segment_ids i32 [B, L] (0 = padding) and cls_positions i32 [B, S]. Returns
    hidden [B, L, D] in cfg.dtype and, with a pooler, pooled [B, D], or [B, S, D] for
    packed rows. Ids must be below the table sizes, which the host checks.
    attention_steps i32 [B, L] define which tokens attend to which (attention_mask.py);
    in a decoder each token attends to those before it.

    at: i32 [B, P], the only positions whose hidden states are needed, [B, P, D]. The
    last layer is computed only there (and where the pooler reads), except for its keys
    and values. If the layers run in a loop (cfg.unroll), it is computed everywhere.
    Raises ValueError if the pooler takes the mean of all tokens.

    inputs: [B, L, E], used instead of word embeddings (transformers' inputs_embeds);
    positions and types are added to them, and input_ids are not read.

    Returns an Encoded. With depths, layers counted from 0, or -1 for the last, returns
    an EncodedInside with the inputs of those layers.
    """
    if not depths:
        return _apply(params, cfg, batch, rng, lambda x: None, at, inputs)[0]
    encoded, (first, results) = _apply(params, cfg, batch, rng, lambda x: x, at, inputs)
    layers = (depth % cfg.num_hidden_layers for depth in depths)
    inner = tuple(results[i - 1] if i else first for i in layers)
    return EncodedInside(*encoded, inner)


def apply_layers(
    params: Params,
    cfg: EncoderConfig,
    batch: dict[str, jax.Array],
    keep: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Evaluate a batch as `apply` does and return keep(x) for every depth.

    keep: a function of the first layer's input and of each layer's result, all [B, L,
    D]. Returns [N + 1, ...]; the last entry is keep(hidden), after the final norm if
    there is one, like transformers' output_hidden_states.
    """
    encoded, (first, results) = _apply(params, cfg, batch, None, keep)
    return jnp.stack([first, *results[:-1], keep(encoded.hidden)])


def _apply(
    params: Params,
    cfg: EncoderConfig,
    batch: dict[str, jax.Array],
    rng: Rng,
    keep: Callable[[jax.Array], Any],
    at: jax.Array | None = None,
    inputs: jax.Array | None = None,
) -> tuple[Encoded, tuple[Any, Any]]:
    """Run the encoder; also return keep(x) of the embeddings and of the layers."""
    with jax.named_scope("embeddings"):
        x = embed(params["embeddings"], cfg, batch, rng, inputs)
    first = keep(x)
    seen = make_attention_inputs(params["embeddings"], cfg, batch)
    positions, pooling = at, ""
    if at is not None and cfg.pooler:
        if cfg.classifier_pooling == "mean":
            raise ValueError("a mean is of all tokens: at does not go with it")
        if cfg.classifier_pooling == "last":
            pooled_at = last_positions(batch)
        else:
            one = jnp.zeros((len(x), 1), jnp.int32)
            pooled_at = batch.get("cls_positions", one)
        positions = jnp.concatenate([pooled_at, at], axis=1)
        pooling = "cls"  # x then begins with the tokens to pool
    run = run_layers(params["layers"], cfg, x, seen, rng, keep, positions)
    x, results = run.hidden, run.kept
    if cfg.final_norm:
        with jax.named_scope("final_norm"):
            x = normalize(params["final_norm"], cfg, x)
    pooled = None
    if cfg.pooler:
        with jax.named_scope("pooler"):
            if positions is not None and "cls_positions" in batch:
                b, s = batch["cls_positions"].shape
                batch = {**batch, "cls_positions": jnp.tile(jnp.arange(s), (b, 1))}
            pooled = pool(params, cfg, x, batch, pooling)
    if at is not None:
        x = x[:, x.shape[1] - at.shape[1] :]
    return Encoded(x, pooled), (first, results)


def count_params(params: Params) -> int:
    """Count the numbers in a tree of arrays or of shapes."""
    return sum(x.size for x in jax.tree.leaves(params))


def without_pooler(cfg: EncoderConfig) -> EncoderConfig:
    """Return the same config without a pooler."""
    return dataclasses.replace(cfg, pooler=False)
