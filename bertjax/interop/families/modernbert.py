# SPDX-License-Identifier: Apache-2.0
"""ModernBERT: rotary positions, layers with global and with local attention."""

from typing import Any

from bertjax.interop import family

FULL, WINDOW = "full_attention", "sliding_attention"


def read_attention(raw: family.Options) -> family.Options:
    """Read which layers attend globally, and the rotary bases, old or new keys."""
    if raw.get("local_attention", 128) == 0:
        raise ValueError("local_attention=0")  # ModernBERT has no window of this size
    thetas = _rope_thetas(raw)
    return {
        "global_attn_every_n_layers": _full_every(raw),
        "rope_theta": float(thetas[FULL]),
        "local_rope_theta": float(thetas[WINDOW]),
    }


def _full_every(raw: family.Options) -> int:
    """Return the interval of layers with global attention. Raises ValueError."""
    every = raw.get("global_attn_every_n_layers", 3)
    types = raw.get("layer_types")
    if types is None:
        if type(every) is not int or every < 1:
            raise ValueError(f"global_attn_every_n_layers={every}")
        return every
    if not isinstance(types, list):
        raise ValueError(f"layer_types={types!r}")
    full = [i for i, layer_type in enumerate(types) if layer_type == FULL]
    # With a single global layer, the other key may exceed the number of layers.
    most = every if type(every) is int else 1
    every = full[1] if len(full) > 1 else max(len(types), most)
    n = raw.get("num_hidden_layers")
    if len(types) != n or full != list(range(0, n, every)):
        raise ValueError(f"layer_types={types}")
    return every


def _rope_thetas(raw: family.Options) -> dict[str, Any]:
    """Return the rotary base for each type of layer. Raises ValueError."""
    theta = raw.get("global_rope_theta") or 160_000.0
    local = raw.get("local_rope_theta", 10_000.0)
    thetas = {FULL: theta, WINDOW: theta if local is None else local}
    # transformers 5 merges rope_scaling into the parameters of both types.
    scaling = dict.fromkeys(thetas, raw.get("rope_scaling"))
    for key, parameters in (
        ("rope_parameters", raw.get("rope_parameters") or {}),
        ("rope_scaling", scaling),
    ):
        if not isinstance(parameters, dict) or not parameters.keys() <= thetas.keys():
            raise ValueError(f"{key}={parameters}")
        for layer_type, rope in parameters.items():
            rope = rope or {}
            # `type` is the older key.
            if rope.get("rope_type", rope.get("type", "default")) != "default":
                raise ValueError(f"{key}={raw[key]}")
            thetas[layer_type] = rope.get("rope_theta", thetas[layer_type])
    if not all(type(t) in (int, float) and 1 <= t <= 1e12 for t in thetas.values()):
        raise ValueError(f"rope_theta={list(thetas.values())!s:.60}")
    return thetas


def write_attention(options: family.Options) -> family.Options:
    """Write the keys that `read_attention` reads, for transformers 4 and 5."""
    every, n = options["global_attn_every_n_layers"], options["num_hidden_layers"]
    theta = options["rope_theta"]
    thetas = {FULL: theta, WINDOW: options["local_rope_theta"] or theta}
    types = (FULL, WINDOW)
    return {
        # transformers 4 reads this and the next two
        "global_attn_every_n_layers": every,
        "global_rope_theta": thetas[FULL],
        "local_rope_theta": thetas[WINDOW],
        "layer_types": [types[bool(i % every)] if every else "" for i in range(n)],
        "rope_parameters": {
            layer_type: {"rope_theta": base, "rope_type": "default"}
            for layer_type, base in thetas.items()
        },
        "embedding_dropout": options["hidden_dropout_prob"],
    }


TASK_HEAD = family.tensors(
    """
    task/transform  head.dense
    task/norm       head.norm
    task            classifier
    """
)
FAMILY = family.Family(
    model_type="modernbert",
    prefix="model.",
    names=family.tensors(
        """
        encoder/embeddings/word         embeddings.tok_embeddings.weight
        encoder/embeddings/norm         embeddings.norm
        encoder/layers/attention/query  layers.{}.attn.Wqkv@0/3
        encoder/layers/attention/key    layers.{}.attn.Wqkv@1/3
        encoder/layers/attention/value  layers.{}.attn.Wqkv@2/3
        encoder/layers/attention/output layers.{}.attn.Wo
        encoder/layers/attention/norm   layers.{}.attn_norm
        encoder/layers/mlp/up           layers.{}.mlp.Wi@0/2
        encoder/layers/mlp/gate         layers.{}.mlp.Wi@1/2
        encoder/layers/mlp/down         layers.{}.mlp.Wo
        encoder/layers/mlp/norm         layers.{}.mlp_norm
        encoder/final_norm              final_norm
        mlm/transform                   head.dense
        mlm/norm                        head.norm
        mlm/bias                        decoder.bias
        mlm/decoder                     decoder.weight
        """
    ),
    defaults={
        **family.DEFAULTS,
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
    renamed={
        "layer_norm_eps": "norm_eps",
        "hidden_act": "hidden_activation",
        "hidden_dropout_prob": "mlp_dropout",
        "attention_probs_dropout_prob": "attention_dropout",
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
    read=read_attention,
    write=write_attention,
    special_ids={**family.ENDS, "cls_token_id": "cls", "sep_token_id": "sep"},
    refused={
        "quantization_config": (None,),
        "classifier_pooling": (None, "cls", "mean"),
    },
    class_prefix="ModernBert",
    classes={"mlm": "ForMaskedLM", "": "Model"},
    task_heads=dict.fromkeys(
        (family.SEQUENCE, family.CHOICE, family.TOKEN, family.ANSWER), TASK_HEAD
    ),
)
