# SPDX-License-Identifier: Apache-2.0
"""Tiny random models in the form of Google's releases and with Hugging Face's names."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from bertjax import UserError, convert
from bertjax.interop import hf_directories

V, E, D, M, P, LAYERS = 40, 6, 16, 24, 20, 2
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, *(f"w{i}" for i in range(V - 5))]
SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": M,
    "max_position_embeddings": P,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
}
BERT = [  # google-research/bert, modeling.py and run_pretraining.py
    ("encoder/layer_{}/attention/self/query", "encoder.layer.{}.attention.self.query"),
    ("encoder/layer_{}/attention/self/key", "encoder.layer.{}.attention.self.key"),
    ("encoder/layer_{}/attention/self/value", "encoder.layer.{}.attention.self.value"),
    (
        "encoder/layer_{}/attention/output/dense",
        "encoder.layer.{}.attention.output.dense",
    ),
    ("encoder/layer_{}/intermediate/dense", "encoder.layer.{}.intermediate.dense"),
    ("encoder/layer_{}/output/dense", "encoder.layer.{}.output.dense"),
    (
        "encoder/layer_{}/attention/output/LayerNorm",
        "encoder.layer.{}.attention.output.LayerNorm",
    ),
    ("encoder/layer_{}/output/LayerNorm", "encoder.layer.{}.output.LayerNorm"),
]
GROUP, THEIRS = (
    "encoder/transformer/group_0/inner_group_0/",
    ("encoder.albert_layer_groups.0.albert_layers.0."),
)
ALBERT = [  # google-research/albert, modeling.py
    ("attention_1/self/query", "attention.query"),
    ("attention_1/self/key", "attention.key"),
    ("attention_1/self/value", "attention.value"),
    ("attention_1/output/dense", "attention.dense"),
    ("ffn_1/intermediate/dense", "ffn"),
    ("ffn_1/intermediate/output/dense", "ffn_output"),
    ("LayerNorm", "attention.LayerNorm"),
    ("LayerNorm_1", "full_layer_layer_norm"),
]
WIDTHS = {"intermediate": (D, M), "ffn": (D, M), "output": (M, D), "ffn_output": (M, D)}


class Model:
    """The same random tensors under both names: `tf` {name: array}, `hf` likewise."""

    def __init__(self, seed=0):
        self.draw = np.random.default_rng(seed).normal
        self.tf, self.hf = {}, {}

    def add(self, tf, hf, shape):
        array = self.draw(size=shape).astype(np.float32)
        self.tf[tf] = array
        self.hf[hf] = np.ascontiguousarray(array.T) if tf.endswith("kernel") else array

    def dense(self, tf, hf, into, out):
        self.add(f"{tf}/kernel", f"{hf}.weight", (into, out))
        self.add(f"{tf}/bias", f"{hf}.bias", (out,))

    def norm(self, tf, hf, width):
        self.add(f"{tf}/gamma", f"{hf}.weight", (width,))
        self.add(f"{tf}/beta", f"{hf}.bias", (width,))

    def embeddings(self, scope, width):
        for kind, rows in (("word", V), ("position", P), ("token_type", 2)):
            name = f"embeddings/{kind}_embeddings"
            there = f"{scope}.{name}.weight".replace("/", ".")
            self.add(f"{scope}/{name}", there, (rows, width))
        self.norm(
            f"{scope}/embeddings/LayerNorm", f"{scope}.embeddings.LayerNorm", width
        )

    def layers(self, scope, there, table, width=D, count=LAYERS):
        for i in range(count):
            for row in table:
                tf, hf = (name.format(i) for name in row)
                tf, hf = f"{scope}/{tf}", f"{there}.{hf}"
                if "LayerNorm" in tf:
                    self.norm(tf, hf, width)
                    continue
                kind = hf.split(".")[-2 if table is BERT else -1]
                kind = "" if "attention" in hf else kind
                shape = WIDTHS.get(kind, (D, D))
                self.dense(tf, hf, *(n * width // D for n in shape))

    def head(self, scope, dense, norm, bias, into, width):
        self.dense(f"{scope}/dense", dense, into, width)
        self.norm(f"{scope}/LayerNorm", norm, width)
        out = f"{scope.removesuffix('/transform')}/output_bias"
        self.add(out, bias, (V,))

    def pair(self, there):
        for leaf, shape in (("weight", (2, D)), ("bias", (2,))):
            name = "output_weights" if leaf == "weight" else "output_bias"
            self.add(f"cls/seq_relationship/{name}", f"{there}.{leaf}", shape)


def bert():
    model = Model()
    model.embeddings("bert", D)
    model.layers("bert", "bert", BERT)
    model.dense("bert/pooler/dense", "bert.pooler.dense", D, D)
    there = "cls.predictions.transform"
    names = f"{there}.dense", f"{there}.LayerNorm", "cls.predictions.bias"
    model.head("cls/predictions/transform", *names, D, D)
    model.pair("cls.seq_relationship")
    return model


def albert():
    model = Model()
    model.embeddings("bert", E)
    into = "encoder/embedding_hidden_mapping_in"
    model.dense(f"bert/{into}", f"bert.{into.replace('/', '.')}", E, D)
    table = [(GROUP + tf, THEIRS + hf) for tf, hf in ALBERT]
    model.layers("bert", "bert", table, count=1)
    model.dense("bert/pooler/dense", "bert.pooler", D, D)
    names = "predictions.dense", "predictions.LayerNorm", "predictions.bias"
    model.head("cls/predictions/transform", *names, D, E)
    model.pair("sop_classifier.classifier")
    model.hf = {k.replace("bert.", "albert.", 1): v for k, v in model.hf.items()}
    return model


def electra(small=D // 2):
    """Make the published form: one checkpoint of both models with shared embeddings."""
    model = Model()
    model.embeddings("electra", E)
    for scope, width in (("electra", D), ("generator", small)):
        into = f"{scope}/embeddings_project"
        model.dense(into, into.replace("/", "."), E, width)
        model.layers(scope, scope, BERT, width)
    there = "discriminator_predictions"
    model.dense(f"{there}/dense", f"{there}.dense", D, D)
    model.dense(f"{there}/dense_1", f"{there}.dense_prediction", D, 1)
    there = "generator_predictions"
    names = f"{there}.dense", f"{there}.LayerNorm", "generator_lm_head.bias"
    model.head(there, *names, small, E)
    return model


def save(folder, prefix, tensors):
    """Write a TensorFlow 1 checkpoint, with optimizer slots."""
    import tensorflow as tf

    slots = {
        f"{n}/adam_{s}": np.zeros_like(a) for n, a in tensors.items() for s in "mv"
    }
    every = {**tensors, **slots, "global_step": np.int64(7)}
    tf.raw_ops.SaveV2(
        prefix=str(folder / prefix),
        tensor_names=list(every),
        shape_and_slices=[""] * len(every),
        tensors=[tf.constant(a) for a in every.values()],
    )


def write(folder, prefix, tensors, config=None, **more):
    folder.mkdir()
    save(folder, prefix, tensors)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    if config:
        (folder / config).write_text(json.dumps({**SIZES, **more}))
    return folder


def write_bert(folder, tensors=None, **more):
    tensors = bert().tf if tensors is None else tensors
    return write(folder, "bert_model.ckpt", tensors, "bert_config.json", **more)


def write_hf(folder, model, kind, **more):
    folder.mkdir(parents=True)
    save_file(model, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"model_type": kind, **SIZES, **more})
    )
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")


def write_pair(folder, change=None, **more):
    """Write generator/ and discriminator/ as Hugging Face directories."""
    made = electra()
    parts = {"discriminator": {}, "generator": {}}
    for name, array in made.hf.items():
        shared = name.startswith("electra.embeddings.")
        if name.startswith(("electra.", "discriminator")):
            parts["discriminator"][name] = array
        if shared or name.startswith("generator"):
            own = name.replace("generator.", "electra.", 1)
            parts["generator"][own] = array.copy()
    if change:
        change(parts)
    half = {"hidden_size": D // 2, "intermediate_size": M // 2}
    sizes = {"embedding_size": E, "num_attention_heads": 1}
    write_hf(folder / "discriminator", parts["discriminator"], "electra", **sizes)
    sizes |= {**half, **more}
    write_hf(folder / "generator", parts["generator"], "electra", **sizes)
    return folder


def same_leaves(a, b):
    assert [*a.leaves] == [*b.leaves] and a.describe() == b.describe()
    for path in a.leaves:
        np.testing.assert_array_equal(a.read(path), b.read(path), err_msg=path)


def opened(folder):
    return hf_directories.open_model(folder, f"--model={folder}")


def refused(folder, *words):
    out = folder.with_name("out")
    with pytest.raises(UserError) as e:
        convert.main([f"--from={folder}", f"--to={out}", "--format=hf"])
    said = str(e.value)
    assert "\n" not in said and all(w in said for w in words), said
    assert not out.exists() and not list(folder.parent.glob(".unfinished*"))
