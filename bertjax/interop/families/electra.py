# SPDX-License-Identifier: Apache-2.0
"""ELECTRA: a generator or a discriminator; hf_directories.py joins a pair."""

from bertjax.interop.families.bert import EMBEDDINGS, LAYERS
from bertjax.interop.family import Family, Options, pooled, task_heads, tensors


def read_embedding_size(raw: Options) -> Options:
    """Return the width of the embeddings, 0 if no projection follows them."""
    width = raw.get("embedding_size", 128)
    return {"embedding_size": 0 if width == raw.get("hidden_size") else width}


def write_embedding_size(options: Options) -> Options:
    return {"embedding_size": options["embedding_size"] or options["hidden_size"]}


FAMILY = Family(
    model_type="electra",
    prefix="electra.",
    names=tensors(
        f"""
        {EMBEDDINGS.strip()}
        {LAYERS.strip()}
        encoder/embeddings/projection   embeddings_project
        mlm/transform                   generator_predictions.dense
        mlm/norm                        generator_predictions.LayerNorm
        mlm/bias                        generator_lm_head.bias
        mlm/decoder                     generator_lm_head.weight
        rtd/transform                   discriminator_predictions.dense
        rtd/output                      discriminator_predictions.dense_prediction
        """
    ),
    fixed={"classifier_activation": "gelu", "pooler_activation": "gelu"},
    read=read_embedding_size,
    write=write_embedding_size,
    class_prefix="Electra",
    classes={"mlm": "ForMaskedLM", "rtd": "ForPreTraining", "": "Model"},
    task_heads=task_heads(
        pooled("classifier.dense", "classifier.out_proj"),
        pooled("sequence_summary.summary"),
    ),
    tf1_names={
        r"dense_prediction\.": "dense_1.",
        r"^generator_lm_head\.bias": "generator_predictions.output_bias",
    },
)
