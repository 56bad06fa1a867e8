# SPDX-License-Identifier: Apache-2.0
"""The configuration of encoders and decoders: sizes and switches, without jax."""

import dataclasses
from collections.abc import Iterator

from bertjax import UserError, registry

ACTIVATIONS = ("gelu", "gelu_tanh", "gelu_new", "gelu_pytorch_tanh")
ACTIVATIONS += ("relu", "relu2", "silu")
# Options that change only how a model is computed, not what it computes.
RUNTIME = ("remat", "unroll", "attention", "max_logits_mb")
ATTENTION = ("xla", "tpu", "gpu", "fused", "splash", "cudnn")
DTYPES = ("float32", "bfloat16")
MOST = 2**31 - 1
POSITIVE = "vocab_size hidden_size num_hidden_layers num_attention_heads"
POSITIVE += " intermediate_size"
NOT_NEGATIVE = "unroll type_vocab_size embedding_size position_offset local_attention"
NOT_NEGATIVE += " relative_attention_num_buckets"
NOT_NEGATIVE += " global_attn_every_n_layers num_hidden_groups max_logits_mb pieces"
NOT_NEGATIVE += " num_decoder_layers"
SKIPS = ("embedding_skip", "value_skip", "unet_skips")
RANGES = {
    **dict.fromkeys(POSITIVE.split(), (1, MOST)),
    **dict.fromkeys(NOT_NEGATIVE.split(), (0, MOST)),
    "max_position_embeddings": (1, 2**24),
    "layer_norm_eps": (1e-15, 1),
    "final_logit_softcapping": (0, 1e6),
    "attention_scale": (0, 1e6),
    "logit_scale": (0, 1e6),
    "initializer_range": (0, 10),
    "hidden_dropout_prob": (0, 1 - 2**-16),  # below 1, where nothing would be left
    "attention_probs_dropout_prob": (0, 1 - 2**-16),
    "rope_theta": (1, 1e12),
    "relative_attention_max_distance": (2, 2**24),
    "local_rope_theta": (0, 1e12),
}


def read_id_streams(written: str) -> dict[str, int]:
    """Parse model.id_streams into {name: rows}; rows is 0 if no number is given.

    >>> read_id_streams("role:32,type")
    {'role': 32, 'type': 0}

    Raises UserError for an invalid name or number, or a repeated name.
    """
    found: dict[str, int] = {}
    for entry in registry.split_list(written):
        name, colon, number = entry.partition(":")
        is_number = number.isdecimal() and 1 <= int(number) <= MOST
        if name in found or not name.isidentifier() or (colon and not is_number):
            raise UserError(
                f"model.id_streams={written}: {entry!r} is not a new NAME or NAME:ROWS"
            )
        found[name] = int(number) if colon else 0
    return found


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Sizes and switches of an encoder, with Hugging Face's names where they exist.

    The defaults are BERT's, and each switch works independently. A comment beside a
    field explains its 0 or "". `hidden_act`: "gelu" is exact (erf); "gelu_tanh",
    "gelu_new" and "gelu_pytorch_tanh" are the approximation of google-research/bert;
    "relu2" is relu squared (So et al. 2021, arXiv 2109.08668, section 3). `unroll` is
    the number of layers per step of the layer loop; 0 unrolls all of them. `remat`
    recomputes activations in the backward pass: "full" everything inside a layer,
    "dots" everything except the results of matrix products.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    # Rows of the position table, including the unused ones before position_offset; for
    # rope and none the length of the longest sequence.
    max_position_embeddings: int = 512
    type_vocab_size: int = 2  # 0: no token types
    # Further streams of ids per token, whose embeddings are added to the words', each
    # with the number of rows of its table: "role:32,type:50002". A batch has them as
    # {name}_ids. In a config a stream that is in data.streams needs no number: its
    # table has 2 rows more than the number of values there (speaker:16; 65,534 if it
    # has no number).
    id_streams: str = ""
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    initializer_range: float = 0.02
    # Initialize with standard deviations by the fan-in of each product instead, and
    # embeddings with a deviation of 1 (as T5 does).
    fan_in_init: bool = False
    # Kernels whose products end in a residual sum (attention/output, mlp/down) are
    # initialized with 0.
    zero_init_outputs: bool = False
    pooler: bool = True
    dtype: str = "float32"
    remat: str = "none"
    unroll: int = 0
    # The attention backend: xla, fused, splash or cudnn (bertjax/models/attention.py);
    # tpu or gpu, the best one there that supports the shapes; or a module of yours
    # that defines make_attention, "my_lab.kernel:block=64".
    attention: str = "xla"
    # Width of the embeddings, with a projection to hidden_size. 0: hidden_size, and no
    # projection.
    embedding_size: int = 0
    embedding_norm: bool = True
    position_embedding_type: str = "absolute"  # learned; or rope, none
    position_offset: int = 0  # row of the first token; RoBERTa's is 2
    rope_theta: float = 10_000.0
    local_rope_theta: float = 0.0  # for local layers; 0: rope_theta
    # Scores get a bias by the distance from query to key, in this many buckets; the
    # last one begins at relative_attention_max_distance. One table serves all layers.
    # 0: no biases.
    relative_attention_num_buckets: int = 0
    relative_attention_max_distance: int = 128
    norm_position: str = "post"  # after each residual sum; pre: before each block
    norm_type: str = "layer_norm"  # or rms_norm
    norm_bias: bool = True
    first_attention_norm: bool = True  # may be False only with norm_position=pre
    final_norm: bool = False  # after the last layer
    attention_bias: bool = True
    # The factor of the products of queries and keys. 0: head_dim^-0.5; T5's is 1.
    attention_scale: float = 0.0
    # Queries and keys of each head go through an RMS norm without scale, before rotary
    # positions (Henry et al. 2020, arXiv 2010.04245; its form as in modded-nanogpt).
    qk_norm: bool = False
    # Causal attention in every layer: a left-to-right language model. With a window a
    # token attends to those at most half of it behind.
    is_decoder: bool = False
    # Layers of a decoder that attends to the encoder's output (decoder.py); both share
    # the word embeddings and all other options. 0: no decoder.
    num_decoder_layers: int = 0
    # Full width of the attention window: a token attends to those at most half of it
    # away. 0: no window.
    local_attention: int = 0
    # Every n-th layer, beginning with the first, attends to all tokens; 0: none does.
    global_attn_every_n_layers: int = 0
    mlp_type: str = "plain"  # or glu: activation(x up) * (x gate)
    mlp_bias: bool = True
    # What layers read besides the previous layer, by learned scalars (skips.py): the
    # embeddings; the values of the first layer's attention, mixed with their own; in
    # the second half of the layers the results of the first half, in reverse order.
    embedding_skip: bool = False
    value_skip: bool = False
    unet_skips: bool = False
    # Sets of layer parameters; layer l uses set floor(l groups / layers). 0: one per
    # layer.
    num_hidden_groups: int = 0
    # The masked-LM head: dense, activation, norm, then the embeddings or its own
    # matrix. False: only the matrix, as in GPT.
    classifier_transform: bool = True
    classifier_bias: bool = True
    classifier_activation: str = ""  # empty: hidden_act
    tie_word_embeddings: bool = True
    decoder_bias: bool = True
    # The factor of hidden states before the output matrix over the vocabulary. 0: no
    # scaling. T5 v1.0, whose matrix is tied, has hidden_size^-0.5.
    logit_scale: float = 0.0
    # Logits over the vocabulary become cap tanh(logits / cap), so none exceeds the cap
    # (Gemma 2, arXiv 2408.00118, section 2). 0: no cap.
    final_logit_softcapping: float = 0.0
    # A whole text's classes are computed from its first token (cls), its last one or
    # the mean of all, through a dense layer and pooler_activation; if that is empty,
    # through neither.
    classifier_pooling: str = "cls"
    pooler_activation: str = "tanh"
    # A task's head begins as the masked LM's does: dense, activation, norm.
    task_transform: bool = False
    # Ids below this number are the tokenizer's pieces; the rows from it on pad the
    # table and are never predicted. 0: all rows are predicted. Empty in a config: the
    # tokenizer's number of pieces; imported models predict all rows.
    pieces: int = 0
    # Largest f32 logits per device in a masked LM's step, in MB (2^20 bytes). Larger
    # ones are computed in chunks, with their gradient or again in the backward pass.
    # From chunks ELECTRA's generator samples the same ids, except where rounding
    # decides. 0: no limit.
    max_logits_mb: int = 0

    def __post_init__(self) -> None:
        for key, known in (
            ("hidden_act", ACTIVATIONS),
            ("classifier_activation", ("", *ACTIVATIONS)),
            ("remat", ("none", "full", "dots")),
            ("classifier_pooling", ("cls", "mean", "last")),
            ("pooler_activation", ("", "tanh", "gelu", "relu")),
            ("position_embedding_type", ("absolute", "rope", "none")),
            ("norm_position", ("post", "pre")),
            ("norm_type", ("layer_norm", "rms_norm")),
            ("mlp_type", ("plain", "glu")),
        ):
            registry.pick(f"model.{key}", getattr(self, key), dict.fromkeys(known))
        registry.pick("dtype", self.dtype, dict.fromkeys(DTYPES))
        if registry.is_outside(self.attention):
            module, _ = registry.parse_options(self.attention, "model.attention")
            registry.check_module("model.attention", module, "")
        else:
            registry.pick("model.attention", self.attention, dict.fromkeys(ATTENTION))
        for name, rows in read_id_streams(self.id_streams).items():
            if not rows:
                raise UserError(
                    f"model.id_streams={self.id_streams}: {name!r} is not a stream of "
                    f"data.streams, so say how many rows its table has: {name}:ROWS"
                )
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise UserError(f"model.{name}={value} is not in [{least}, {most}]")
        for message in self._clashes():
            raise UserError(message)

    def _clashes(self) -> Iterator[str]:
        """Yield a message for each combination of options that is not supported."""
        is_rope = self.position_embedding_type == "rope"
        positions = f"model.position_embedding_type={self.position_embedding_type}"
        offset = f"model.position_offset={self.position_offset}"
        groups = f"model.num_hidden_groups={self.num_hidden_groups}"
        sizes = f"{self.hidden_size} / {self.num_attention_heads}"
        if self.hidden_size % self.num_attention_heads:
            yield (
                f"model.num_attention_heads={self.num_attention_heads} does not divide "
                f"model.hidden_size={self.hidden_size}"
            )
        if self.position_offset > 0 and self.position_embedding_type != "absolute":
            yield f"{offset} needs a table of positions, and {positions}"
        if self.max_length < 1:
            rows = f"model.max_position_embeddings={self.max_position_embeddings} rows"
            yield f"{offset} leaves none of {rows}"
        if is_rope and self.hidden_size // self.num_attention_heads % 2 == 1:
            yield (
                f"{positions} rotates pairs: hidden_size / model.num_attention_heads = "
                f"{sizes} must be even"
            )
        if self.local_rope_theta > 0 and not (is_rope and self.local_attention):
            yield (
                f"model.local_rope_theta={self.local_rope_theta} needs "
                "model.position_embedding_type=rope and model.local_attention"
            )
        if self.global_attn_every_n_layers > 0 and not self.local_attention:
            yield (
                f"model.global_attn_every_n_layers={self.global_attn_every_n_layers} "
                "needs model.local_attention, the window of the other layers"
            )
        if self.norm_type == "rms_norm" and self.norm_bias:
            yield "model.norm_type=rms_norm has no bias: set model.norm_bias=False"
        if not self.first_attention_norm and self.norm_position != "pre":
            yield "model.first_attention_norm=False needs model.norm_position=pre"
        is_grouped = 0 < self.num_hidden_groups < self.num_hidden_layers
        if is_grouped and not self.first_attention_norm:
            yield (
                f"model.first_attention_norm=False and {groups}: the first layer lacks "
                "what layers of its group have"
            )
        skips = [k for k in SKIPS if getattr(self, k)]
        deep = [k for k in skips if k != "embedding_skip"]
        if deep and self.num_hidden_layers < 2:
            yield f"model.{deep[0]}=True needs model.num_hidden_layers=2 or more"
        if skips and is_grouped:
            yield (
                f"model.{skips[0]}=True and {groups}: each layer has scalars of its "
                "own, and layers of a group share all that they have"
            )
        if self.relative_attention_num_buckets:
            yield from self._bucket_clashes()
        if self.num_decoder_layers:
            yield from self._decoder_clashes()
        if not self.classifier_transform and self.embedding_width != self.hidden_size:
            yield (
                f"model.embedding_size={self.embedding_size} needs "
                "model.classifier_transform: without it hidden states meet embeddings "
                f"of another width than model.hidden_size={self.hidden_size}"
            )
        if self.num_hidden_groups > self.num_hidden_layers:
            layers = f"model.num_hidden_layers={self.num_hidden_layers}"
            yield f"{groups} is more than {layers}"

    def _bucket_clashes(self) -> Iterator[str]:
        """Check that the buckets are possible: half of them hold one distance each."""
        buckets = self.relative_attention_num_buckets
        key = f"model.relative_attention_num_buckets={buckets}"
        least = 2 if self.is_decoder else 4
        is_one_sided = self.is_decoder or self.num_decoder_layers > 0
        one_side = buckets if is_one_sided else buckets // 2
        if buckets < least:
            yield f"{key}: there must be {least} buckets or more, or 0"
        elif self.relative_attention_max_distance <= one_side // 2:
            most = self.relative_attention_max_distance
            yield (
                f"{key}: the first {one_side // 2} distances have a bucket each, so "
                f"model.relative_attention_max_distance={most} must be more"
            )

    def _decoder_clashes(self) -> Iterator[str]:
        """Yield a message for each option that excludes num_decoder_layers."""
        key = f"model.num_decoder_layers={self.num_decoder_layers}"
        if self.is_decoder:
            yield (
                f"{key} and model.is_decoder=True: an encoder's tokens see both sides; "
                "a language model without one has model.num_hidden_layers alone"
            )
        if not self.first_attention_norm:
            yield f"{key} and model.first_attention_norm=False: a decoder has all norms"
        for name in ("embedding_size", "num_hidden_groups", *SKIPS):
            if value := getattr(self, name):
                yield f"{key} and model.{name}={value}: a decoder has no such option"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def embedding_width(self) -> int:
        return self.embedding_size or self.hidden_size

    @property
    def has_head_parameters(self) -> bool:
        """False if the head over the vocabulary is only the word embeddings."""
        has_own = self.classifier_transform or self.decoder_bias
        return has_own or not self.tie_word_embeddings

    @property
    def max_length(self) -> int:
        """The length of the longest sequence that has positions."""
        return self.max_position_embeddings - self.position_offset

    @property
    def groups(self) -> tuple[int, ...]:
        """The set of parameters of each layer (Lan et al. 2020, section 3.1)."""
        n = self.num_hidden_layers
        # This is exact. transformers' int(i / (n / groups)) rounds: if the groups do
        # not divide the layers it may be one less, as at layer 9 of 18 in 14 groups;
        # interop/families/albert.py refuses such models.
        return tuple(i * (self.num_hidden_groups or n) // n for i in range(n))

    @property
    def is_global(self) -> tuple[bool, ...]:
        """Whether the tokens of each layer attend to all others, not to a window."""
        every = self.global_attn_every_n_layers
        return tuple(
            not self.local_attention or (every > 0 and i % every == 0)
            for i in range(self.num_hidden_layers)
        )


def decoder_config(cfg: EncoderConfig) -> EncoderConfig:
    """Return the config of the decoder's own layers, as that of a causal encoder.

    Its relative positions are one-sided, and it has no token types and no streams of
    ids: only the encoder has them.
    """
    return dataclasses.replace(
        cfg,
        num_hidden_layers=cfg.num_decoder_layers,
        num_decoder_layers=0,
        is_decoder=True,
        type_vocab_size=0,
        id_streams="",
        pooler=False,
    )


def generator_config(cfg: EncoderConfig, width: int) -> EncoderConfig:
    """Return the config of an ELECTRA generator for a discriminator's config.

    The generator has as many layers, hidden size `width` and heads of 64; its MLP is
    narrower in the same proportion. It projects the shared embeddings, [V, E], unless
    it is as wide as they are (google-research/electra, run_pretraining.py).
    """
    if cfg.relative_attention_num_buckets:
        raise UserError(
            "objective: electra's generator reads its discriminator's embeddings, "
            "whose relative positions are of other heads: set "
            "model.relative_attention_num_buckets=0"
        )
    n = max(1, width // 64)
    if width % n:
        raise UserError(
            f"objective: electra's generator is {width} wide, which its {n} heads do "
            f"not divide: take another share of model.hidden_size={cfg.hidden_size}"
        )
    return dataclasses.replace(
        cfg,
        hidden_size=width,
        num_attention_heads=n,
        intermediate_size=cfg.intermediate_size * width // cfg.hidden_size,
        embedding_size=0 if width == cfg.embedding_width else cfg.embedding_width,
        num_decoder_layers=0,  # the discriminator may begin from a T5 or BART
        pooler=False,
    )
