# SPDX-License-Identifier: Apache-2.0
"""Counts of floating point operations, computed from a model's sizes without jax."""

from bertjax.models.config import EncoderConfig, decoder_config


def keys_seen(cfg: EncoderConfig, length: int) -> tuple[float, ...]:
    """Return the number of keys that a query attends to, per layer, in such rows.

    In a decoder the first tokens attend to fewer keys, so it is the mean over the
    queries: (length + 1) / 2 without a window.
    """
    near = cfg.local_attention // 2
    if cfg.is_decoder:
        whole = (length + 1) / 2
        n = min(length, near + 1)
        window = (n * (n + 1) / 2 + (length - n) * n) / length
    else:
        whole, window = length, min(length, 2 * near + 1)
    return tuple(whole if every else window for every in cfg.is_global)


def flops_per_token(
    cfg: EncoderConfig, length: int, predictions: int, everywhere: bool = True
) -> float:
    """Count the FLOPs of forward and backward per token slot, encoder and head.

    The head is a masked LM's, computed at `predictions` of `length` slots.
    """
    head = head_flops(cfg, length, predictions)
    return encoder_flops(cfg, length, predictions, everywhere) + head


def head_flops(cfg: EncoderConfig, length: int, predictions: int) -> float:
    """Count the FLOPs of a masked LM's head, forward and backward, per token slot."""
    d, e = cfg.hidden_size, cfg.embedding_width
    transform = d * e if cfg.classifier_transform else 0
    return 6.0 * ((transform + cfg.vocab_size * e) * predictions / length)


def encoder_flops(
    cfg: EncoderConfig, length: int, predictions: int, everywhere: bool = True
) -> float:
    """Count the encoder's FLOPs of forward and backward per token slot.

    Each weight of a token's matrix products counts 6, and each key of each layer counts
    12 D for the scores and the weighted sum of the values. everywhere: the last layer's
    result is read at every slot; otherwise only at the predictions and, with a pooler,
    at a first token, and the other slots need no queries in that layer.
    """
    d, m, e = cfg.hidden_size, cfg.intermediate_size, cfg.embedding_width
    matrices = 3 if cfg.mlp_type == "glu" else 2
    # What only queries need: query, output and MLP. All slots need keys and values.
    own = 2 * d * d + matrices * d * m
    keys = keys_seen(cfg, length)
    read = 1.0 if everywhere else min(1.0, (predictions + cfg.pooler) / length)
    layers = cfg.num_hidden_layers * (2 * d * d + own) - (1 - read) * own
    seen = sum(keys) - (1 - read) * keys[-1]
    projection = e * d if cfg.embedding_size else 0
    return 6.0 * (layers + 2 * seen * d + projection)


def decoder_flops(cfg: EncoderConfig, length: int, memory: int) -> float:
    """Count a decoder's FLOPs, forward and backward, per slot of its own tokens.

    length: slots per row; memory: the encoder's slots per row, for which the
    cross-attention of each layer computes keys and values. Weights and keys count as in
    `encoder_flops`.
    """
    d, n = cfg.hidden_size, cfg.num_decoder_layers
    cross = 2 * d * d * (1 + memory / length) + 2 * memory * d
    return encoder_flops(decoder_config(cfg), length, 0) + 6.0 * n * cross
