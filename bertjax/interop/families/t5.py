# SPDX-License-Identifier: Apache-2.0
"""T5 (Raffel et al. 2020, arXiv 1910.10683) and T5 1.1: encoder and decoder.

config.json does not mention that there are no biases, that attention scores are not
scaled, and that instead of positions there are biases by distance, from one table per
stack, stored in its first layer.
"""

from bertjax.interop import family

# config.json may omit the length of texts, and nothing in the model limits it.
LONGEST = 2**24
STACK = """
    {0}/embeddings/relative         {0}.block.0.layer.0.SelfAttention.relative_attention_bias.weight
    {0}/layers/attention/query      {0}.block.{{}}.layer.0.SelfAttention.q
    {0}/layers/attention/key        {0}.block.{{}}.layer.0.SelfAttention.k
    {0}/layers/attention/value      {0}.block.{{}}.layer.0.SelfAttention.v
    {0}/layers/attention/output     {0}.block.{{}}.layer.0.SelfAttention.o
    {0}/layers/attention/norm       {0}.block.{{}}.layer.0.layer_norm
    {0}/layers/mlp/up               {0}.block.{{}}.layer.{1}.DenseReluDense.wi
    {0}/layers/mlp/down             {0}.block.{{}}.layer.{1}.DenseReluDense.wo
    {0}/layers/mlp/norm             {0}.block.{{}}.layer.{1}.layer_norm
    {0}/final_norm                  {0}.final_layer_norm
"""  # noqa: E501
CROSS = """
    decoder/layers/cross/query      decoder.block.{}.layer.1.EncDecAttention.q
    decoder/layers/cross/key        decoder.block.{}.layer.1.EncDecAttention.k
    decoder/layers/cross/value      decoder.block.{}.layer.1.EncDecAttention.v
    decoder/layers/cross/output     decoder.block.{}.layer.1.EncDecAttention.o
    decoder/layers/cross/norm       decoder.block.{}.layer.1.layer_norm
"""
GLU = """
    {0}/layers/mlp/up               {0}.block.{{}}.layer.{1}.DenseReluDense.wi_0
    {0}/layers/mlp/gate             {0}.block.{{}}.layer.{1}.DenseReluDense.wi_1
"""


def read_options(raw: family.Options) -> family.Options:
    """Return the MLP's type, the scale of hidden states before the head, and sizes.

    Raises ValueError.
    """
    width, heads, d_kv = raw["d_model"], raw["num_heads"], raw.get("d_kv", 64)
    if d_kv * heads != width:
        raise ValueError(
            f"d_kv={d_kv} with num_heads={heads} and d_model={width} (heads here are "
            "d_model / num_heads wide)"
        )
    projection = raw.get("feed_forward_proj") or "relu"
    gated, _, act = projection.rpartition("-")
    if gated not in ("", "gated"):
        raise ValueError(f"feed_forward_proj={projection!r}")
    if projection == "gated-gelu":
        act = "gelu_new"
    layers = raw.get("num_decoder_layers")
    layers = raw["num_layers"] if layers is None else layers
    if layers < 1:
        raise ValueError(f"num_decoder_layers={layers}")
    # transformers 5 ties as the files do, and stores the scaling, once
    # implied by tying, here.
    is_scaled = raw.get("scale_decoder_outputs", raw.get("tie_word_embeddings", True))
    dropout = raw.get("dropout_rate", 0.1)
    return {
        "num_decoder_layers": layers,
        "mlp_type": "glu" if gated else "plain",
        # If the two keys disagree, transformers uses the first.
        "hidden_act": raw.get("dense_act_fn") or act,
        "logit_scale": width**-0.5 if is_scaled is not False else 0.0,
        "attention_probs_dropout_prob": raw.get("attention_dropout_rate", dropout),
        "max_position_embeddings": raw.get("n_positions") or LONGEST,
    }


def write_options(options: family.Options) -> family.Options:
    """Write the keys that `read_options` reads. The last two are bertjax's own."""
    act, is_glu = options["hidden_act"], options["mlp_type"] == "glu"
    name = "gelu" if is_glu and act == "gelu_new" else act
    more = {}
    if options["max_position_embeddings"] != LONGEST:
        more["n_positions"] = options["max_position_embeddings"]
    dropout = options["attention_probs_dropout_prob"]
    if dropout != options["hidden_dropout_prob"]:
        more["attention_dropout_rate"] = dropout
    return {
        "d_kv": options["hidden_size"] // options["num_attention_heads"],
        "num_decoder_layers": options["num_decoder_layers"],
        "feed_forward_proj": "gated-" * is_glu + name,
        "dense_act_fn": act,
        "is_gated_act": is_glu,
        "scale_decoder_outputs": options["logit_scale"] != 0,
        "is_encoder_decoder": True,
        **more,
    }


FAMILY = family.Family(
    model_type="t5",
    prefix="",
    names=family.tensors(
        "encoder/embeddings/word shared.weight"
        + STACK.format("encoder", 1)
        + STACK.format("decoder", 2)
        + CROSS
        + "mlm/decoder lm_head.weight"
    ),
    glu_names=family.tensors(GLU.format("encoder", 1) + GLU.format("decoder", 2)),
    aliases={
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    },
    ties_by_file=True,
    defaults={
        "layer_norm_eps": 1e-6,
        "hidden_dropout_prob": 0.1,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
    },
    renamed={
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "d_ff",
        "layer_norm_eps": "layer_norm_epsilon",
        "hidden_dropout_prob": "dropout_rate",
    },
    fixed={
        "max_position_embeddings": LONGEST,  # set by `read_options`
        "type_vocab_size": 0,
        "position_embedding_type": "none",
        "attention_scale": 1.0,
        "embedding_norm": False,
        "norm_position": "pre",
        "norm_type": "rms_norm",
        "norm_bias": False,
        "final_norm": True,
        "attention_bias": False,
        "mlp_bias": False,
        "pooler": False,
        "classifier_transform": False,
        "decoder_bias": False,
    },
    read=read_options,
    write=write_options,
    special_ids={
        "decoder_start_token_id": "pad",
        "eos_token_id": "sep",
        "pad_token_id": "pad",
    },
    decoder_start="pad",
    refused={
        "is_decoder": (None, False),
        "is_encoder_decoder": (None, True),
        "quantization_config": (None,),
    },
    class_prefix="T5",
    classes={"mlm": "ForConditionalGeneration", "": "Model"},
    task_heads={},
)
