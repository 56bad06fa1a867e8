# SPDX-License-Identifier: Apache-2.0
"""Small finetuned models of each family; a tensor's name determines its values."""

import json
import re
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

DATA = Path(__file__).parents[1] / "testdata"
LAYOUTS = json.loads((DATA / "hf_layouts.json").read_text())
# model_type -> the model of hf_layouts.json that has its encoder.
FAMILIES = {
    "bert": "bert",
    "roberta": "roberta",
    "xlm-roberta": "xlm-roberta",
    "camembert": "camembert",
    "albert": "albert",
    "distilbert": "distilbert",
    "modernbert": "modernbert",
    "mpnet": "mpnet",
    "electra": "electra_discriminator",
}
# Causal language models of hf_layouts.json -> their classes in transformers.
CAUSAL = {
    "gpt2": ("LMHeadModel", "TokenClassification", "QuestionAnswering"),
    "gpt2_untied": ("LMHeadModel",),
}
PREFIXES = dict.fromkeys(("xlm-roberta", "camembert"), "roberta.")
PREFIXES |= {"modernbert": "model.", **dict.fromkeys(CAUSAL, "transformer.")}
KINDS = (
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
    "MultipleChoice",
)
LABELS = ["left", "right", "none"]
IDS = np.array([[2, 9, 10, 11, 12, 3], [2, 13, 14, 3, 1, 1]], np.int32)
MASK = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], np.int32)


def draw(name, shape):
    """Return a tensor with values between -1/2 and 1/2, f32, determined by its name."""
    start = zlib.crc32(name.encode()) % 1000
    return np.sin(start + np.arange(np.prod(shape))).reshape(shape).astype("f4") / 2


def config_of(family, kind):
    """Return the config.json of a finetuned model, as transformers would write it."""
    told = {**LAYOUTS[FAMILIES.get(family, family)]["config"]}
    stem = re.split("For|LMHead", told["architectures"][0])[0]
    told["architectures"] = [stem + kind if "LM" in kind else f"{stem}For{kind}"]
    labels = LABELS if kind != "QuestionAnswering" else ["LABEL_0", "LABEL_1"]
    told["id2label"] = {str(i): name for i, name in enumerate(labels)}
    return told


def encoder_shapes(family):
    """Return the shapes of the encoder's tensors, without the pooler."""
    prefix = PREFIXES.get(family, f"{family}.")
    there = LAYOUTS[FAMILIES.get(family, family)]["shapes"]
    return {k: v for k, v in there.items() if k.startswith(prefix) and "pool" not in k}


def write(folder, family, kind, heads, **config):
    """Write a directory and return its tensors; heads: shapes of the other tensors."""
    folder.mkdir(exist_ok=True)
    shapes = {**encoder_shapes(family), **heads}
    made = {name: draw(name, shape) for name, shape in shapes.items()}
    save_file(made, folder / "model.safetensors")
    told = {**config_of(family, kind), **config}
    (folder / "config.json").write_text(json.dumps(told))
    return made
