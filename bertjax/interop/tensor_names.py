# SPDX-License-Identifier: Apache-2.0
"""Which tensor of a family's files is which leaf of ours, for both directions.

Names are those of transformers (models/*/modeling_*.py).
"""

from collections.abc import Mapping

# Axes of our leaves: V vocabulary, E embedding, D hidden, H heads, K head width, M mlp,
# P positions, T token types, C two classes, S the classes of a task, O one.
# "in>out" is stored as [out, in] in their files; letters without a comma between them
# are one axis there: "D>HK" is [D, H, K] here and [H*K, D] there. Leaves of
# encoder/layers have the layers before.
LAYOUTS = {
    "encoder/embeddings/word": "V,E",
    "encoder/embeddings/position": "P,E",
    "encoder/embeddings/token_type": "T,E",
    "encoder/embeddings/norm/scale": "E",
    "encoder/embeddings/norm/bias": "E",
    "encoder/embeddings/projection/kernel": "E>D",
    "encoder/embeddings/projection/bias": "D",
    "encoder/layers/attention/query/kernel": "D>HK",
    "encoder/layers/attention/query/bias": "HK",
    "encoder/layers/attention/key/kernel": "D>HK",
    "encoder/layers/attention/key/bias": "HK",
    "encoder/layers/attention/value/kernel": "D>HK",
    "encoder/layers/attention/value/bias": "HK",
    "encoder/layers/attention/output/kernel": "HK>D",
    "encoder/layers/attention/output/bias": "D",
    "encoder/layers/attention/norm/scale": "D",
    "encoder/layers/attention/norm/bias": "D",
    "encoder/layers/mlp/up/kernel": "D>M",
    "encoder/layers/mlp/up/bias": "M",
    "encoder/layers/mlp/gate/kernel": "D>M",
    "encoder/layers/mlp/gate/bias": "M",
    "encoder/layers/mlp/down/kernel": "M>D",
    "encoder/layers/mlp/down/bias": "D",
    "encoder/layers/mlp/norm/scale": "D",
    "encoder/layers/mlp/norm/bias": "D",
    "encoder/final_norm/scale": "D",
    "encoder/final_norm/bias": "D",
    "encoder/pooler/kernel": "D>D",
    "encoder/pooler/bias": "D",
    "mlm/transform/kernel": "D>E",
    "mlm/transform/bias": "E",
    "mlm/norm/scale": "E",
    "mlm/norm/bias": "E",
    "mlm/bias": "V",
    "mlm/decoder": "V,E",
    "rtd/transform/kernel": "D>D",
    "rtd/transform/bias": "D",
    "rtd/output/kernel": "D>O",
    "rtd/output/bias": "O",
    "nsp/kernel": "D>C",
    "nsp/bias": "C",
    "sop/kernel": "D>C",
    "sop/bias": "C",
}
TASKS = {"classify": "S", "regress": "O", "tag": "S", "span": "C", "choose": "O"}
for _task, _out in TASKS.items():
    LAYOUTS |= {
        f"{_task}/transform/kernel": "D>D",
        f"{_task}/transform/bias": "D",
        f"{_task}/norm/scale": "D",
        f"{_task}/norm/bias": "D",
        f"{_task}/kernel": f"D>{_out}",
        f"{_task}/bias": _out,
    }
# The leaves of a dense layer and of a norm, as torch calls them.
LINEAR = {"kernel": "weight", "bias": "bias"}
NORM = {"scale": "weight", "bias": "bias"}


def rows(kinds: Mapping[str, str], table: str) -> dict[str, str]:
    """Read lines of "ours theirs" and give each the leaves of `kinds`.

    A name may end in @1/3, the second third of a tensor's rows.

    >>> rows(NORM, "mlm/norm head.norm")
    {'mlm/norm/scale': 'head.norm.weight', 'mlm/norm/bias': 'head.norm.bias'}
    """
    found = {}
    for line in table.strip().splitlines():
        ours, theirs = line.split()
        name, at, part = theirs.partition("@")
        for leaf, last in kinds.items():
            found[f"{ours}/{leaf}"] = f"{name}.{last}{at}{part}"
    return found


EMBEDDINGS = {
    "encoder/embeddings/word": "embeddings.word_embeddings.weight",
    "encoder/embeddings/position": "embeddings.position_embeddings.weight",
    **rows(NORM, "encoder/embeddings/norm embeddings.LayerNorm"),
}
TYPES = {"encoder/embeddings/token_type": "embeddings.token_type_embeddings.weight"}
BODY = {
    **EMBEDDINGS,
    **TYPES,
    **rows(
        LINEAR,
        """
        encoder/layers/attention/query  encoder.layer.{}.attention.self.query
        encoder/layers/attention/key    encoder.layer.{}.attention.self.key
        encoder/layers/attention/value  encoder.layer.{}.attention.self.value
        encoder/layers/attention/output encoder.layer.{}.attention.output.dense
        encoder/layers/mlp/up           encoder.layer.{}.intermediate.dense
        encoder/layers/mlp/down         encoder.layer.{}.output.dense
        """,
    ),
    **rows(
        NORM,
        """
        encoder/layers/attention/norm   encoder.layer.{}.attention.output.LayerNorm
        encoder/layers/mlp/norm         encoder.layer.{}.output.LayerNorm
        """,
    ),
}
POOLER = rows(LINEAR, "encoder/pooler pooler.dense")

BERT = {
    **BODY,
    **POOLER,
    **rows(LINEAR, "mlm/transform cls.predictions.transform.dense"),
    **rows(NORM, "mlm/norm cls.predictions.transform.LayerNorm"),
    "mlm/bias": "cls.predictions.bias",
    "mlm/decoder": "cls.predictions.decoder.weight",
    **rows(LINEAR, "nsp cls.seq_relationship"),
}

ROBERTA = {
    **BODY,
    **POOLER,
    **rows(LINEAR, "mlm/transform lm_head.dense"),
    **rows(NORM, "mlm/norm lm_head.layer_norm"),
    "mlm/bias": "lm_head.bias",
    "mlm/decoder": "lm_head.decoder.weight",
}

GROUP = "encoder.albert_layer_groups.{}.albert_layers.0"
ALBERT = {
    **EMBEDDINGS,
    **TYPES,
    **rows(
        LINEAR,
        f"""
        encoder/embeddings/projection   encoder.embedding_hidden_mapping_in
        encoder/layers/attention/query  {GROUP}.attention.query
        encoder/layers/attention/key    {GROUP}.attention.key
        encoder/layers/attention/value  {GROUP}.attention.value
        encoder/layers/attention/output {GROUP}.attention.dense
        encoder/layers/mlp/up           {GROUP}.ffn
        encoder/layers/mlp/down         {GROUP}.ffn_output
        encoder/pooler                  pooler
        mlm/transform                   predictions.dense
        sop                             sop_classifier.classifier
        """,
    ),
    **rows(
        NORM,
        f"""
        encoder/layers/attention/norm   {GROUP}.attention.LayerNorm
        encoder/layers/mlp/norm         {GROUP}.full_layer_layer_norm
        mlm/norm                        predictions.LayerNorm
        """,
    ),
    "mlm/bias": "predictions.bias",
    "mlm/decoder": "predictions.decoder.weight",
}

ELECTRA = {
    **BODY,
    **rows(
        LINEAR,
        """
        encoder/embeddings/projection   embeddings_project
        mlm/transform                   generator_predictions.dense
        rtd/transform                   discriminator_predictions.dense
        rtd/output                      discriminator_predictions.dense_prediction
        """,
    ),
    **rows(NORM, "mlm/norm generator_predictions.LayerNorm"),
    "mlm/bias": "generator_lm_head.bias",
    "mlm/decoder": "generator_lm_head.weight",
}

DISTILBERT = {
    **EMBEDDINGS,
    **rows(
        LINEAR,
        """
        encoder/layers/attention/query  transformer.layer.{}.attention.q_lin
        encoder/layers/attention/key    transformer.layer.{}.attention.k_lin
        encoder/layers/attention/value  transformer.layer.{}.attention.v_lin
        encoder/layers/attention/output transformer.layer.{}.attention.out_lin
        encoder/layers/mlp/up           transformer.layer.{}.ffn.lin1
        encoder/layers/mlp/down         transformer.layer.{}.ffn.lin2
        mlm/transform                   vocab_transform
        """,
    ),
    **rows(
        NORM,
        """
        encoder/layers/attention/norm   transformer.layer.{}.sa_layer_norm
        encoder/layers/mlp/norm         transformer.layer.{}.output_layer_norm
        mlm/norm                        vocab_layer_norm
        """,
    ),
    "mlm/bias": "vocab_projector.bias",
    "mlm/decoder": "vocab_projector.weight",
}

MODERNBERT = {
    "encoder/embeddings/word": "embeddings.tok_embeddings.weight",
    **rows(
        LINEAR,
        """
        encoder/layers/attention/query  layers.{}.attn.Wqkv@0/3
        encoder/layers/attention/key    layers.{}.attn.Wqkv@1/3
        encoder/layers/attention/value  layers.{}.attn.Wqkv@2/3
        encoder/layers/attention/output layers.{}.attn.Wo
        encoder/layers/mlp/up           layers.{}.mlp.Wi@0/2
        encoder/layers/mlp/gate         layers.{}.mlp.Wi@1/2
        encoder/layers/mlp/down         layers.{}.mlp.Wo
        mlm/transform                   head.dense
        """,
    ),
    **rows(
        NORM,
        """
        encoder/embeddings/norm         embeddings.norm
        encoder/layers/attention/norm   layers.{}.attn_norm
        encoder/layers/mlp/norm         layers.{}.mlp_norm
        encoder/final_norm              final_norm
        mlm/norm                        head.norm
        """,
    ),
    "mlm/bias": "decoder.bias",
    "mlm/decoder": "decoder.weight",
}

# Heads of tasks, by family: what ends the class's name -> the tensors of the head, and
# of the dense layer before it where that is no part of the encoder there.
SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"
ANSWER, CHOICE = "ForQuestionAnswering", "ForMultipleChoice"
_CLASSES = rows(LINEAR, "task classifier")
_TRANSFORM = {
    **rows(LINEAR, "task/transform head.dense"),
    **rows(NORM, "task/norm head.norm"),
    **_CLASSES,
}
_SPLIT = rows(
    LINEAR,
    """
    encoder/pooler classifier.dense
    task           classifier.out_proj
    """,
)
_PLAIN = {TOKEN: _CLASSES, ANSWER: rows(LINEAR, "task qa_outputs")}


def _pooled(name: str) -> dict[str, str]:
    return rows(LINEAR, f"encoder/pooler {name}") | _CLASSES


_BERT = _pooled("pooler.dense")
_ROBERTA = {SEQUENCE: _SPLIT, CHOICE: _BERT, **_PLAIN}
HEADS = {
    "bert": {SEQUENCE: _BERT, CHOICE: _BERT, **_PLAIN},
    "albert": {SEQUENCE: _pooled("pooler"), CHOICE: _pooled("pooler"), **_PLAIN},
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "electra": {
        SEQUENCE: _SPLIT,
        CHOICE: _pooled("sequence_summary.summary"),
        **_PLAIN,
    },
    "distilbert": {
        SEQUENCE: _pooled("pre_classifier"),
        CHOICE: _pooled("pre_classifier"),
        **_PLAIN,
    },
    "modernbert": dict.fromkeys((SEQUENCE, CHOICE, TOKEN, ANSWER), _TRANSFORM),
}
