# SPDX-License-Identifier: Apache-2.0
"""Floating point operations of models, counted by their sizes, without jax."""

from bertjax.models.config import EncoderConfig, decoder_config


def keys_seen(cfg: EncoderConfig, length: int) -> tuple[float, ...]:
    """Return how many keys a query of each layer looks at, in rows of this length.

    In a decoder, whose first tokens see fewer, it is the mean: (length + 1) / 2.
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
    """Count floating point operations of forward and backward per token slot.

    Those of the encoder, and of a masked LM's head at `predictions` of `length` slots.
    """
    head = head_flops(cfg, length, predictions)
    return encoder_flops(cfg, length, predictions, everywhere) + head


def head_flops(cfg: EncoderConfig, length: int, predictions: int) -> float:
    """Count those of a masked LM's head, forward and backward, per token slot."""
    d, e = cfg.hidden_size, cfg.embedding_width
    transform = d * e if cfg.classifier_transform else 0
    return 6.0 * ((transform + cfg.vocab_size * e) * predictions / length)


def encoder_flops(
    cfg: EncoderConfig, length: int, predictions: int, everywhere: bool = True
) -> float:
    """Count floating point operations of forward and backward per token slot.

    6 for each weight of a matrix product a token goes through, and 12 D for each key of
    each layer for the attention scores and their use. everywhere: the last layer's
    result is read at every slot, not at the predictions and a first token alone; what
    is not read needs no queries.
    """
    d, m, e = cfg.hidden_size, cfg.intermediate_size, cfg.embedding_width
    matrices = 3 if cfg.mlp_type == "glu" else 2
    own = 2 * d * d + matrices * d * m  # of what asks; keys and values are of all
    keys = keys_seen(cfg, length)
    read = 1.0 if everywhere else min(1.0, (predictions + cfg.pooler) / length)
    layers = cfg.num_hidden_layers * (2 * d * d + own) - (1 - read) * own
    seen = sum(keys) - (1 - read) * keys[-1]
    projection = e * d if cfg.embedding_size else 0
    return 6.0 * (layers + 2 * seen * d + projection)


def decoder_flops(cfg: EncoderConfig, length: int, memory: int) -> float:
    """Count those of a decoder, forward and backward, per slot of its own tokens.

    length: slots of a row; memory: the encoder's, of which the cross-attention of each
    layer makes keys and values. Weights and keys count as in `encoder_flops`.
    """
    d, n = cfg.hidden_size, cfg.num_decoder_layers
    cross = 2 * d * d * (1 + memory / length) + 2 * memory * d
    return encoder_flops(decoder_config(cfg), length, 0) + 6.0 * n * cross
