# SPDX-License-Identifier: Apache-2.0
"""BART (Lewis et al. 2020, arXiv 1910.13461) and mBART: encoder and decoder."""

import dataclasses

from bertjax.interop import family

OFFSET = 2  # rows before the first position, as in fairseq
STACK = """
    {0}/embeddings/position         {0}.embed_positions.weight
    {0}/embeddings/norm             {0}.layernorm_embedding
    {0}/layers/attention/query      {0}.layers.{{}}.self_attn.q_proj
    {0}/layers/attention/key        {0}.layers.{{}}.self_attn.k_proj
    {0}/layers/attention/value      {0}.layers.{{}}.self_attn.v_proj
    {0}/layers/attention/output     {0}.layers.{{}}.self_attn.out_proj
    {0}/layers/attention/norm       {0}.layers.{{}}.self_attn_layer_norm
    {0}/layers/mlp/up               {0}.layers.{{}}.fc1
    {0}/layers/mlp/down             {0}.layers.{{}}.fc2
    {0}/layers/mlp/norm             {0}.layers.{{}}.final_layer_norm
"""
CROSS = """
    decoder/layers/cross/query      decoder.layers.{}.encoder_attn.q_proj
    decoder/layers/cross/key        decoder.layers.{}.encoder_attn.k_proj
    decoder/layers/cross/value      decoder.layers.{}.encoder_attn.v_proj
    decoder/layers/cross/output     decoder.layers.{}.encoder_attn.out_proj
    decoder/layers/cross/norm       decoder.layers.{}.encoder_attn_layer_norm
"""
FINAL_NORMS = """
    encoder/final_norm              encoder.layer_norm
    decoder/final_norm              decoder.layer_norm
"""
# Here both stacks have the same number of heads and the same MLP width.
SHARED = {"attention_heads": 16, "ffn_dim": 4096}


def read_options(raw: family.Options) -> family.Options:
    """Return the rows of positions and the decoder's layers.

    Raises ValueError if the stacks differ in an option that they share here.
    """
    for key, usual in SHARED.items():
        names = f"encoder_{key}", f"decoder_{key}"
        a, b = (usual if raw.get(name) is None else raw[name] for name in names)
        if a != b:
            raise ValueError(f"{names[0]}={a} with {names[1]}={b}")
    layers = raw.get("decoder_layers")
    layers = 12 if layers is None else layers
    if layers < 1:
        raise ValueError(f"decoder_layers={layers}")
    return {
        "num_decoder_layers": layers,
        "max_position_embeddings": raw["max_position_embeddings"] + OFFSET,
    }


def write_options(options: family.Options) -> family.Options:
    """Write the keys that `read_options` reads."""
    return {
        "decoder_layers": options["num_decoder_layers"],
        "decoder_attention_heads": options["num_attention_heads"],
        "decoder_ffn_dim": options["intermediate_size"],
        "max_position_embeddings": options["max_position_embeddings"] - OFFSET,
        "is_encoder_decoder": True,
        "forced_eos_token_id": None,  # unless the model came with one
    }


FAMILY = family.Family(
    model_type="bart",
    prefix="model.",
    names=family.tensors(
        "encoder/embeddings/word shared.weight"
        + STACK.format("encoder")
        + STACK.format("decoder")
        + CROSS
        + "mlm/decoder lm_head.weight"
    )
    | {"mlm/bias": "final_logits_bias"},
    aliases={
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    },
    # The release lacks the head: it is the embeddings with this bias of zero.
    zeros=frozenset({"mlm/bias"}),
    row_vectors="final_logits_bias",
    defaults={
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
    renamed={
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
        "num_attention_heads": "encoder_attention_heads",
        "intermediate_size": "encoder_ffn_dim",
        "hidden_act": "activation_function",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "initializer_range": "init_std",
    },
    fixed={
        "layer_norm_eps": 1e-5,
        "type_vocab_size": 0,
        "position_offset": OFFSET,
        "pooler": False,
        "classifier_transform": False,
    },
    read=read_options,
    write=write_options,
    special_ids={**family.ENDS, "decoder_start_token_id": "sep"},
    decoder_start="sep",
    refused={
        "scale_embedding": (None, False),
        "is_decoder": (None, False),
        "is_encoder_decoder": (None, True),
        "quantization_config": (None,),
    },
    class_prefix="Bart",
    classes={"mlm": "ForConditionalGeneration", "": "Model"},
    task_heads={},
)
# Liu et al. 2020 (arXiv 2001.08210): norms before the blocks, and one after the last. A
# decoder begins with the language's piece, which is forced after bos.
MBART = dataclasses.replace(
    FAMILY,
    model_type="mbart",
    names={**FAMILY.names, **family.tensors(FINAL_NORMS)},
    fixed={**FAMILY.fixed, "norm_position": "pre", "final_norm": True},
    special_ids=family.ENDS,
    decoder_start="cls",
    class_prefix="MBart",
)
