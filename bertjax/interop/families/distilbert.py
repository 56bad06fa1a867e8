# SPDX-License-Identifier: Apache-2.0
"""DistilBERT: BERT without token types and pooler, with its own tensor names."""

from bertjax.interop.families.bert import EMBEDDINGS
from bertjax.interop.family import Family, pooled, task_heads, tensors

POOLED = pooled("pre_classifier")
FAMILY = Family(
    model_type="distilbert",
    prefix="distilbert.",
    names=tensors(
        f"""
        {EMBEDDINGS.strip()}
        encoder/layers/attention/query  transformer.layer.{{}}.attention.q_lin
        encoder/layers/attention/key    transformer.layer.{{}}.attention.k_lin
        encoder/layers/attention/value  transformer.layer.{{}}.attention.v_lin
        encoder/layers/attention/output transformer.layer.{{}}.attention.out_lin
        encoder/layers/attention/norm   transformer.layer.{{}}.sa_layer_norm
        encoder/layers/mlp/up           transformer.layer.{{}}.ffn.lin1
        encoder/layers/mlp/down         transformer.layer.{{}}.ffn.lin2
        encoder/layers/mlp/norm         transformer.layer.{{}}.output_layer_norm
        mlm/transform                   vocab_transform
        mlm/norm                        vocab_layer_norm
        mlm/bias                        vocab_projector.bias
        mlm/decoder                     vocab_projector.weight
        """
    ),
    renamed={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    },
    fixed={"type_vocab_size": 0, "layer_norm_eps": 1e-12, "pooler_activation": "relu"},
    class_prefix="DistilBert",
    classes={"mlm": "ForMaskedLM", "": "Model"},
    task_heads=task_heads(POOLED, POOLED),
)
