# SPDX-License-Identifier: Apache-2.0
"""Heads on an encoder: masked LM, classification, replaced token detection."""

from typing import Any

import jax
import jax.numpy as jnp

from bertjax.models.config import EncoderConfig
from bertjax.models.initializers import draw_params
from bertjax.models.layers import (
    Params,
    Rng,
    activate,
    draw,
    dropout,
    layer_norm,
    linear,
    linear_specs,
    norm_specs,
    product_f32,
    product_f32_transposed,
)
from bertjax.models.pooling import normalize_vectors
from bertjax.models.row_chunks import count_row_chunks, map_rows

NEG_INF = -1e9  # the logit of an id without probability, finite in bfloat16 too


def init_mlm(rng: jax.Array, cfg: EncoderConfig) -> Params:
    """Initialize the masked-LM head: transform [D, E], norm, output bias [V].

    Its output matrix is tied to the embeddings, or "decoder" [V, E]. A tied head
    without transform and bias (GPT's) has no parameters: {}.
    """
    d, e = cfg.hidden_size, cfg.embedding_width
    specs: dict[str, Any] = {}
    if cfg.classifier_transform:
        dense = linear_specs(into=(d,), out=(e,), bias=cfg.classifier_bias)
        specs |= {"transform": dense, "norm": norm_specs(e, cfg.norm_bias)}
    if cfg.decoder_bias:
        specs["bias"] = ((cfg.vocab_size,), 0.0)
    if not cfg.tie_word_embeddings:
        specs["decoder"] = ((cfg.vocab_size, e), "normal")
    return draw_params(rng, specs, cfg)


def mlm_logits(
    params: Params, word: jax.Array, cfg: EncoderConfig, hidden: jax.Array
) -> jax.Array:
    """Return the logits of the tokens at P positions, f32 [B, P, V].

    params: the head's; word: the embeddings [V, E], for a head that is tied to them;
    hidden: the hidden states at these positions, [B, P, D]. (Devlin et al. 2019,
    section 3.1; transform and bias as in google-research/bert, run_pretraining.py; E as
    in Lan et al. 2020, section 3.1.)
    """
    with jax.named_scope("mlm_head"):
        b, p, d = hidden.shape
        x = before_matrix(params, cfg, hidden.reshape(b * p, d))
        logits = product_f32(x, params.get("decoder", word).astype(x.dtype), 1)
        return finish_logits(params, cfg, logits, 1).reshape(b, p, -1)


def token_logits(params: Params, cfg: EncoderConfig, hidden: jax.Array) -> jax.Array:
    """Return `mlm_logits` by the whole tree of a model's parameters: f32 [B, P, V]."""
    word = params["encoder"]["embeddings"]["word"]
    return mlm_logits(params.get("mlm", {}), word, cfg, hidden)


def log_likelihoods(
    params: Params,
    word: jax.Array,
    cfg: EncoderConfig,
    x: jax.Array,
    ids: jax.Array,
    never: int | None = None,
) -> jax.Array:
    """Return ln p of the token ids i32 [T] given hidden states x [T, D]: f32 [T].

    The result is that of `mlm_logits`, but the logits are laid out as [V, T], with
    which both the product and the sums over V are faster on a CPU. never: an id that
    gets no probability, or None.
    """
    with jax.named_scope("mlm_head"):
        x = before_matrix(params, cfg, x)
        table = params.get("decoder", word).astype(x.dtype)
        logits = product_f32_transposed(x, table)
        logits = finish_logits(params, cfg, logits, 0)
        if never is not None:
            logits = jnp.where(
                jnp.arange(len(logits))[:, None] == never, NEG_INF, logits
            )
        true = jnp.take_along_axis(logits, ids[None], axis=0, mode="clip")[0]
        return true - jax.nn.logsumexp(logits, axis=0)


def finish_logits(
    params: Params, cfg: EncoderConfig, logits: jax.Array, axis: int
) -> jax.Array:
    """Add the masked LM's output bias to the products, and cap the sums.

    logits: the products, f32 [T, V] (axis 1) or [V, T] (axis 0). Ids that are never
    predicted keep their logit NEG_INF: it is not capped.
    """
    cap = cfg.final_logit_softcapping
    if cap:
        bias = params.get("bias")
        sums = logits if bias is None else logits + jnp.expand_dims(bias, 1 - axis)
        logits, params = cap * jnp.tanh(sums / cap), {}
    bias = output_bias(params, cfg)
    if bias is None:
        return logits
    return logits + (bias if axis else bias[:, None])


def output_bias(params: Params, cfg: EncoderConfig) -> jax.Array | None:
    """Return the bias [V] of the masked LM's logits, None if there is none.

    Rows that pad the table (EncoderConfig.pieces) get a bias of NEG_INF, so that they
    have no probability and no gradient.
    """
    bias = params.get("bias")
    if not 0 < cfg.pieces < cfg.vocab_size:
        return bias
    is_piece = jnp.arange(cfg.vocab_size) < cfg.pieces
    return jnp.where(is_piece, 0.0 if bias is None else bias, NEG_INF)


def before_matrix(params: Params, cfg: EncoderConfig, x: jax.Array) -> jax.Array:
    """Return the input of the masked LM's output matrix, [..., E], from x [..., D]."""
    x = transform(params, cfg, x)
    return x * cfg.logit_scale if cfg.logit_scale else x


def transform(params: Params, cfg: EncoderConfig, x: jax.Array) -> jax.Array:
    """Apply the head's dense layer, activation and norm to x [..., D]: [..., E].

    Returns x itself if the head has no transform.
    """
    if "transform" not in params:
        return x
    act = cfg.classifier_activation or cfg.hidden_act
    x = activate(linear(params["transform"], x), act)
    return layer_norm(params["norm"], x, cfg.layer_norm_eps, cfg.norm_type)


def term_weights(
    params: Params,
    word: jax.Array,
    cfg: EncoderConfig,
    hidden: jax.Array,
    members: jax.Array,
) -> jax.Array:
    """Return each text's SPLADE weights, f32 [B, S, V]: ln(1 + relu(max logit)).

    params, word, hidden [B, L, D]: as for `mlm_logits`. members: boolean [B, S, L],
    which tokens belong to which text; the weights of a text without tokens are 0. The
    batch is processed in chunks of rows if its logits take more than cfg.max_logits_mb.
    (Formal et al. 2021, SPLADE v2, equation 6.)
    """

    def by_text(rows: tuple[jax.Array, jax.Array], number: Any) -> jax.Array:
        hidden, members = rows
        logits = mlm_logits(params, word, cfg, hidden)
        each = [
            jnp.max(jnp.where(members[:, slot, :, None], logits, 0.0), axis=1)
            for slot in range(members.shape[1])
        ]
        return jnp.stack(each, axis=1)

    rows, length, _ = hidden.shape
    floats = length * cfg.vocab_size
    chunks = count_row_chunks(rows, floats, cfg.max_logits_mb)
    best = map_rows(by_text, chunks, (hidden, members))
    return jnp.log1p(jax.nn.relu(best))


def token_vectors(params: Params, hidden: jax.Array) -> jax.Array:
    """Project hidden [B, L, D] to vectors of length 1, f32 [B, L, E] (ColBERT)."""
    with jax.named_scope("token_vectors"):
        kernel = params["kernel"].astype(hidden.dtype)
        return normalize_vectors(product_f32(hidden, kernel, 0))


def init_classes(rng: jax.Array, cfg: EncoderConfig, classes: int = 2) -> Params:
    """Initialize a classification head: kernel [D, C] and bias [C]."""
    specs = linear_specs(into=(cfg.hidden_size,), out=(classes,))
    return draw(rng, specs, cfg.initializer_range)


def class_logits(params: Params, vectors: jax.Array) -> jax.Array:
    """Return f32 logits [..., C] from vectors [..., D]."""
    with jax.named_scope("classes"):
        return linear_f32(params, vectors)


def linear_f32(params: Params, x: jax.Array) -> jax.Array:
    """Return x @ kernel + bias, f32 [..., C], for x [..., D] of any dtype.

    Logits must not be rounded to bfloat16 before a softmax: with its 8 bits, logits
    between 4 and 8 would be multiples of 1/32.
    """
    y = product_f32(x, params["kernel"].astype(x.dtype), 0)
    return y + params["bias"]


def init_task(rng: jax.Array, cfg: EncoderConfig, classes: int = 2) -> Params:
    """Initialize a task's head: kernel [D, C], bias, and a transform if configured.

    The kernel is drawn from a normal without truncation, as in transformers, because
    results of finetuning are compared with those of transformers.
    """
    d = cfg.hidden_size
    specs: dict[str, Any] = linear_specs(into=(d,), out=(classes,))
    specs["kernel"] = ((d, classes), "uncut")
    if cfg.task_transform:
        dense = linear_specs(into=(d,), out=(d,), bias=cfg.classifier_bias)
        specs |= {"transform": dense, "norm": norm_specs(d, cfg.norm_bias)}
    return draw(rng, specs, cfg.initializer_range)


def task_shardings(name: str) -> tuple[tuple[str, str], ...]:
    """Return the logical axes of `params[name]`, a head created by `init_task`."""
    return (
        (f"{name}/transform/kernel", "embed width"),
        (f"{name}/(transform/bias|norm/(scale|bias))", "width"),
        (f"{name}/kernel", "embed classes"),
        (f"{name}/bias", "classes"),
    )


def task_logits(
    params: Params, cfg: EncoderConfig, vectors: jax.Array, rng: Rng = None
) -> jax.Array:
    """Return f32 logits [..., C] of a task from vectors [..., D].

    Applies dropout to the input of the classes, at the rate of hidden states, unless
    rng is None.
    """
    if "transform" in params:
        vectors = transform(params, cfg, vectors)
    return class_logits(params, dropout(vectors, cfg.hidden_dropout_prob, rng))


def init_rtd(rng: jax.Array, cfg: EncoderConfig) -> Params:
    """Initialize ELECTRA's replaced-token head: transform [D, D], output [D, 1]."""
    d = cfg.hidden_size
    specs = {
        "transform": linear_specs(into=(d,), out=(d,)),
        "output": linear_specs(into=(d,), out=(1,)),
    }
    return draw(rng, specs, cfg.initializer_range)


def rtd_logits(params: Params, cfg: EncoderConfig, hidden: jax.Array) -> jax.Array:
    """Return f32 logits [B, L] that tokens are replaced, from hidden [B, L, D].

    Clark et al. 2020 (ELECTRA), section 2.
    """
    b, length, d = hidden.shape
    with jax.named_scope("rtd_head"):
        x = hidden.reshape(b * length, d)
        x = activate(linear(params["transform"], x), cfg.hidden_act)
        return linear_f32(params["output"], x).reshape(b, length)
