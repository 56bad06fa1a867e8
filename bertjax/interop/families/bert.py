# SPDX-License-Identifier: Apache-2.0
"""BERT, and the tensor names that its relatives share."""

from bertjax.interop.family import (
    DEFAULTS,
    REFUSED,
    Family,
    pooled,
    task_heads,
    tensors,
)

EMBEDDINGS = """
    encoder/embeddings/word         embeddings.word_embeddings.weight
    encoder/embeddings/position     embeddings.position_embeddings.weight
    encoder/embeddings/token_type   embeddings.token_type_embeddings.weight
    encoder/embeddings/norm         embeddings.LayerNorm
"""
LAYERS = """
    encoder/layers/attention/query  encoder.layer.{}.attention.self.query
    encoder/layers/attention/key    encoder.layer.{}.attention.self.key
    encoder/layers/attention/value  encoder.layer.{}.attention.self.value
    encoder/layers/attention/output encoder.layer.{}.attention.output.dense
    encoder/layers/attention/norm   encoder.layer.{}.attention.output.LayerNorm
    encoder/layers/mlp/up           encoder.layer.{}.intermediate.dense
    encoder/layers/mlp/down         encoder.layer.{}.output.dense
    encoder/layers/mlp/norm         encoder.layer.{}.output.LayerNorm
"""
POOLED = pooled("pooler.dense")
FAMILY = Family(
    model_type="bert",
    prefix="bert.",
    names=tensors(
        f"""
        {EMBEDDINGS.strip()}
        {LAYERS.strip()}
        encoder/pooler  pooler.dense
        mlm/transform   cls.predictions.transform.dense
        mlm/norm        cls.predictions.transform.LayerNorm
        mlm/bias        cls.predictions.bias
        mlm/decoder     cls.predictions.decoder.weight
        nsp             cls.seq_relationship
        """
    ),
    aliases={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    class_prefix="Bert",
    classes={
        "mlm+nsp": "ForPreTraining",
        "mlm": "ForMaskedLM",
        "nsp": "ForNextSentencePrediction",
        "": "Model",
    },
    decoder_classes={"mlm": "LMHeadModel", "": "Model"},
    task_heads=task_heads(POOLED, POOLED),
    defaults={**DEFAULTS, "is_decoder": False},
    refused={k: v for k, v in REFUSED.items() if k != "is_decoder"},
    tf1_config="bert_config.json",
    tf1_names={
        r"predictions\.bias": "predictions.output_bias",
        r"seq_relationship\.bias": "seq_relationship.output_bias",
        r"seq_relationship\.weight": "seq_relationship.output_weights",
    },
)
