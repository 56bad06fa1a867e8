# SPDX-License-Identifier: Apache-2.0
"""The families: their keys of config.json, for both directions; names.py has theirs.

Keys and defaults are those of transformers (models/*/configuration_*.py).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from bertjax.interop import tensor_names

Options = dict[str, Any]


def same(raw: Options) -> Options:
    return {}


@dataclasses.dataclass(frozen=True)
class Family:
    """What config.json calls `model_type`.

    names: path of ours -> name of theirs, {} for the layer's number.
    prefix: stands before the encoder's names in files of models with a head.
    keys: option of EncoderConfig -> key of config.json; defaults: of those that may be
    missing (transformers' own). read(raw), write(options): what keys cannot say.
    fixed: options that all of the family have.
    classes: heads -> transformers' class; the first whose heads are all there.
    special: key of config.json -> role of the special piece whose id it is.
    refused: key of config.json that changes what is computed -> values that are known.
    aliases: a tensor's other name -> its name in the table.
    outside: paths of the encoder that are part of a head there: without the prefix.
    after_padding: positions begin after the row of the padding piece's id.
    """

    model_type: str
    names: Mapping[str, str]
    prefix: str
    keys: Mapping[str, str]
    classes: tuple[tuple[frozenset[str], str], ...]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read: Callable[[Options], Options] = same
    write: Callable[[Options], Options] = same
    special: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"pad_token_id": "pad"}
    )
    refused: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    outside: frozenset[str] = frozenset()
    after_padding: bool = False


# ---------------------------------------------------------------- config.json
KEYS = {
    name: name
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "type_vocab_size",
        "layer_norm_eps",
        "hidden_act",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "initializer_range",
        "tie_word_embeddings",
    )
}
DEFAULTS = {
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
REFUSED = {
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "quantization_config": (None,),
}
ENDS = {"bos_token_id": "cls", "eos_token_id": "sep", "pad_token_id": "pad"}


def classes(**heads: str) -> tuple[tuple[frozenset[str], str], ...]:
    """Read mlm_nsp="BertForPreTraining", ..., none="BertModel", in this order."""
    return tuple(
        (frozenset() if names == "none" else frozenset(names.split("_")), name)
        for names, name in heads.items()
    )


def read_roberta(raw: Options) -> Options:
    # Positions begin after the padding id's row (fairseq's make_positions).
    pad = raw.get("pad_token_id")
    return {"position_offset": (1 if pad is None else pad) + 1}


def read_electra(raw: Options) -> Options:
    # A projection is there only where the widths differ.
    width = raw.get("embedding_size", 128)
    return {"embedding_size": 0 if width == raw.get("hidden_size") else width}


def write_electra(options: Options) -> Options:
    width = options["embedding_size"] or options["hidden_size"]
    return {"embedding_size": width}


def read_modernbert(raw: Options) -> Options:
    """Read which layers see all, and the bases of the rotation, old or new."""
    n = raw.get("num_hidden_layers")
    every = raw.get("global_attn_every_n_layers", 3)
    kinds = raw.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise ValueError(f"layer_types={kinds!r}")
    if kinds is not None:
        full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        # With a single one of them the other key may say more than there are layers.
        most = every if type(every) is int else 1
        every = full[1] if len(full) > 1 else max(len(kinds), most)
        if len(kinds) != n or full != list(range(0, n, every)):
            raise ValueError(f"layer_types={kinds}")
    elif type(every) is not int or every < 1:
        raise ValueError(f"global_attn_every_n_layers={every}")
    if raw.get("local_attention", 128) == 0:
        raise ValueError("local_attention=0")  # which is no window here
    theta = raw.get("global_rope_theta") or 160_000.0
    near = raw.get("local_rope_theta", 10_000.0)
    near = theta if near is None else near
    thetas = {"full_attention": theta, "sliding_attention": near}
    # transformers 5 puts rope_scaling into both kinds' parameters.
    both = dict.fromkeys(thetas, raw.get("rope_scaling"))
    for key, ropes in (
        ("rope_parameters", raw.get("rope_parameters") or {}),
        ("rope_scaling", both),
    ):
        if not isinstance(ropes, dict) or not ropes.keys() <= thetas.keys():
            raise ValueError(f"{key}={ropes}")
        for kind, said in ropes.items():
            said = said or {}
            # `type` is the older key.
            if said.get("rope_type", said.get("type", "default")) != "default":
                raise ValueError(f"{key}={raw[key]}")
            thetas[kind] = said.get("rope_theta", thetas[kind])
    if not all(type(t) in (int, float) and 1 <= t <= 1e12 for t in thetas.values()):
        raise ValueError(f"rope_theta={list(thetas.values())!s:.60}")
    return {
        "global_attn_every_n_layers": every,
        "rope_theta": float(thetas["full_attention"]),
        "local_rope_theta": float(thetas["sliding_attention"]),
    }


def write_modernbert(options: Options) -> Options:
    every, n = options["global_attn_every_n_layers"], options["num_hidden_layers"]
    bases = {
        "full_attention": options["rope_theta"],
        "sliding_attention": options["local_rope_theta"] or options["rope_theta"],
    }
    kinds = list(bases)
    return {
        "global_attn_every_n_layers": every,  # this and the next two: transformers 4
        "global_rope_theta": bases["full_attention"],
        "local_rope_theta": bases["sliding_attention"],
        "layer_types": [kinds[bool(i % every)] if every else "" for i in range(n)],
        "rope_parameters": {
            kind: {"rope_theta": base, "rope_type": "default"}
            for kind, base in bases.items()
        },
        "embedding_dropout": options["hidden_dropout_prob"],
    }


# ---------------------------------------------------------------- the families
BERT = Family(
    model_type="bert",
    names=tensor_names.BERT,
    prefix="bert.",
    keys=KEYS,
    defaults=DEFAULTS,
    classes=classes(
        mlm_nsp="BertForPreTraining",
        mlm="BertForMaskedLM",
        nsp="BertForNextSentencePrediction",
        none="BertModel",
    ),
    refused=REFUSED,
    aliases={"cls.predictions.decoder.bias": "cls.predictions.bias"},
)
ROBERTA = Family(
    model_type="roberta",
    names=tensor_names.ROBERTA,
    prefix="roberta.",
    keys=KEYS,
    defaults=DEFAULTS,
    fixed={"classifier_activation": "gelu"},
    read=read_roberta,
    after_padding=True,
    special=ENDS,
    classes=classes(mlm="RobertaForMaskedLM", none="RobertaModel"),
    refused=REFUSED,
    aliases={"lm_head.decoder.bias": "lm_head.bias"},
)
XLM_ROBERTA = dataclasses.replace(
    ROBERTA,
    model_type="xlm-roberta",
    classes=classes(mlm="XLMRobertaForMaskedLM", none="XLMRobertaModel"),
)
CAMEMBERT = dataclasses.replace(
    ROBERTA,
    model_type="camembert",
    classes=classes(mlm="CamembertForMaskedLM", none="CamembertModel"),
)
ALBERT = Family(
    model_type="albert",
    names=tensor_names.ALBERT,
    prefix="albert.",
    keys={
        **KEYS,
        "embedding_size": "embedding_size",
        "num_hidden_groups": "num_hidden_groups",
    },
    defaults={
        **DEFAULTS,
        "embedding_size": 128,
        "num_hidden_groups": 1,
        "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    special=ENDS,
    classes=classes(
        mlm_sop="AlbertForPreTraining", mlm="AlbertForMaskedLM", none="AlbertModel"
    ),
    refused={**REFUSED, "inner_group_num": (None, 1)},
    aliases={"predictions.decoder.bias": "predictions.bias"},
)
ELECTRA = Family(
    model_type="electra",
    names=tensor_names.ELECTRA,
    prefix="electra.",
    keys=KEYS,
    defaults=DEFAULTS,
    fixed={"classifier_activation": "gelu", "pooler_activation": "gelu"},
    read=read_electra,
    write=write_electra,
    classes=classes(
        mlm="ElectraForMaskedLM", rtd="ElectraForPreTraining", none="ElectraModel"
    ),
    refused=REFUSED,
)
DISTILBERT = Family(
    model_type="distilbert",
    names=tensor_names.DISTILBERT,
    prefix="distilbert.",
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "max_position_embeddings": "max_position_embeddings",
        "hidden_act": "activation",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "initializer_range": "initializer_range",
        "tie_word_embeddings": "tie_word_embeddings",
    },
    defaults=DEFAULTS,
    fixed={
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-12,
        "pooler_activation": "relu",
    },
    classes=classes(mlm="DistilBertForMaskedLM", none="DistilBertModel"),
    refused=REFUSED,
)
MODERNBERT = Family(
    model_type="modernbert",
    names=tensor_names.MODERNBERT,
    prefix="model.",
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "intermediate_size": "intermediate_size",
        "max_position_embeddings": "max_position_embeddings",
        "layer_norm_eps": "norm_eps",
        "hidden_act": "hidden_activation",
        "hidden_dropout_prob": "mlp_dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "initializer_range": "initializer_range",
        "tie_word_embeddings": "tie_word_embeddings",
        "norm_bias": "norm_bias",
        "attention_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
        "local_attention": "local_attention",
        "classifier_bias": "classifier_bias",
        "classifier_activation": "classifier_activation",
        "decoder_bias": "decoder_bias",
        "classifier_pooling": "classifier_pooling",
    },
    defaults={
        **DEFAULTS,
        "layer_norm_eps": 1e-5,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "local_attention": 128,
        "classifier_bias": False,
        "classifier_activation": "gelu",
        "decoder_bias": True,
        "classifier_pooling": "cls",
    },
    fixed={
        "type_vocab_size": 0,
        "position_embedding_type": "rope",
        "norm_position": "pre",
        "first_attention_norm": False,
        "final_norm": True,
        "mlp_type": "glu",
        "pooler_activation": "",
        "task_transform": True,
    },
    read=read_modernbert,
    write=write_modernbert,
    special={**ENDS, "cls_token_id": "cls", "sep_token_id": "sep"},
    classes=classes(mlm="ModernBertForMaskedLM", none="ModernBertModel"),
    refused={"quantization_config": (None,)},
)
FAMILIES = {
    f.model_type: f
    for f in (
        BERT,
        ROBERTA,
        XLM_ROBERTA,
        CAMEMBERT,
        ALBERT,
        ELECTRA,
        DISTILBERT,
        MODERNBERT,
    )
}
# Other names of activations in config.json -> ours; what they compute is the same.
ACTIVATIONS = {"gelu_python": "gelu", "gelu_fast": "gelu_pytorch_tanh", "swish": "silu"}
