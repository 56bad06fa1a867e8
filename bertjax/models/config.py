# SPDX-License-Identifier: Apache-2.0
"""What an encoder is made of: sizes and switches, without jax."""

import dataclasses

from bertjax import UserError, registry

# Published shapes (Turc et al. 2019, arXiv 1908.08962; Devlin et al. 2019 for base
# and large): layers, width, heads. The MLP is four times as wide, heads are 64 wide.
SIZES = {
    "tiny": dict(num_hidden_layers=2, hidden_size=128, num_attention_heads=2),
    "mini": dict(num_hidden_layers=4, hidden_size=256, num_attention_heads=4),
    "small": dict(num_hidden_layers=4, hidden_size=512, num_attention_heads=8),
    "medium": dict(num_hidden_layers=8, hidden_size=512, num_attention_heads=8),
    "base": dict(num_hidden_layers=12, hidden_size=768, num_attention_heads=12),
    "large": dict(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16),
}
ACTIVATIONS = ("gelu", "gelu_tanh")
REMAT = ("none", "full", "dots")
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Sizes and switches of an encoder; Hugging Face's names where they exist.

    `type_vocab_size=0` leaves token types out. `hidden_act` is "gelu" (exact, erf)
    or "gelu_tanh" (the approximation of google-research/bert). `unroll` is the
    number of layers a step of the layer loop runs; 0 unrolls all of them. `remat`
    recomputes in the backward pass: "full" everything inside a layer, "dots" all
    but the results of matrix products.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    initializer_range: float = 0.02
    pooler: bool = True
    dtype: str = "float32"
    remat: str = "none"
    unroll: int = 0

    def __post_init__(self) -> None:
        registry.pick("model.hidden_act", self.hidden_act, dict.fromkeys(ACTIVATIONS))
        registry.pick("model.remat", self.remat, dict.fromkeys(REMAT))
        registry.pick("dtype", self.dtype, dict.fromkeys(DTYPES))
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name}={getattr(self, name)} must be positive")
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"model.num_attention_heads={self.num_attention_heads} does not divide "
                f"model.hidden_size={self.hidden_size}"
            )
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"model.{name}={getattr(self, name)} is not in [0, 1)")
        if self.unroll < 0 or self.type_vocab_size < 0:
            raise UserError("model.unroll and model.type_vocab_size are not negative")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


def flops_per_token(cfg: EncoderConfig, length: int, predictions: int) -> float:
    """Count floating point operations of forward and backward per token slot.

    6 for each weight of a matrix product a token goes through, 12 N L D for the
    attention scores and their use, and the head at `predictions` of `length` slots.
    """
    d, m = cfg.hidden_size, cfg.intermediate_size
    layers = cfg.num_hidden_layers * (4 * d * d + 2 * d * m)
    attention = 2 * cfg.num_hidden_layers * length * d
    head = (d * d + cfg.vocab_size * d) * predictions / length
    return 6.0 * (layers + attention + head)
