# SPDX-License-Identifier: Apache-2.0
"""GPT-2: a causal language model whose head is tied to its embeddings."""

from bertjax.interop import family


def read_mlp_width(raw: family.Options) -> family.Options:
    """Return the MLP's width: n_inner, or four times the model's. Raises ValueError."""
    width = raw.get("n_inner")
    if width is None:
        width = 4 * raw["n_embd"]
    if type(width) is not int or width < 1:
        raise ValueError(f"n_inner={width!r}")
    return {"intermediate_size": width}


def write_mlp_width(options: family.Options) -> family.Options:
    """Write the key that `read_mlp_width` reads, and one that follows from others."""
    width = options["intermediate_size"]
    return {
        "n_inner": None if width == 4 * options["hidden_size"] else width,
        "embd_pdrop": options["hidden_dropout_prob"],
    }


FAMILY = family.Family(
    model_type="gpt2",
    prefix="transformer.",
    names=family.tensors(
        """
        encoder/embeddings/word         wte.weight
        encoder/embeddings/position     wpe.weight
        encoder/layers/attention/query  h.{}.attn.c_attn@0/3
        encoder/layers/attention/key    h.{}.attn.c_attn@1/3
        encoder/layers/attention/value  h.{}.attn.c_attn@2/3
        encoder/layers/attention/output h.{}.attn.c_proj
        encoder/layers/attention/norm   h.{}.ln_1
        encoder/layers/mlp/up           h.{}.mlp.c_fc
        encoder/layers/mlp/down         h.{}.mlp.c_proj
        encoder/layers/mlp/norm         h.{}.ln_2
        encoder/final_norm              ln_f
        mlm/decoder                     lm_head.weight
        """
    ),
    swapped=r"h\.\d+\.(attn|mlp)\.c_\w+\.weight",
    defaults={**family.DEFAULTS, "layer_norm_eps": 1e-5, "hidden_act": "gelu_new"},
    renamed={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
        "hidden_dropout_prob": "resid_pdrop",
        "attention_probs_dropout_prob": "attn_pdrop",
    },
    fixed={
        "intermediate_size": 0,  # set by `read_mlp_width`
        "type_vocab_size": 0,
        "is_decoder": True,
        "embedding_norm": False,
        "norm_position": "pre",
        "final_norm": True,
        "classifier_transform": False,
        "decoder_bias": False,
        "classifier_pooling": "last",
        "pooler_activation": "",
    },
    read=read_mlp_width,
    write=write_mlp_width,
    special_ids=family.ENDS,
    # reorder_and_upcast_attn scales keys before the product instead of the result, and
    # computes in f32. The numbers are the same, and attention is f32 here in any case.
    refused={
        "scale_attn_weights": (None, True),
        "scale_attn_by_inverse_layer_idx": (None, False),
        "add_cross_attention": (None, False),
        "quantization_config": (None,),
    },
    class_prefix="GPT2",
    classes={"mlm": "LMHeadModel", "": "Model"},
    # GPT2ForSequenceClassification is not here, because its classes have no bias.
    task_heads={
        family.TOKEN: family.tensors("task classifier"),
        family.ANSWER: family.tensors("task qa_outputs"),
    },
)
