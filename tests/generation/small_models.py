# SPDX-License-Identifier: Apache-2.0
"""Small models of each family that generates, with determined tensors, and prompts."""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

sys.path.append(str(Path(__file__).parents[1] / "interop"))
import heads_data
import seq2seq_data

DATA = heads_data.DATA

NAMES = ("gpt2", "t5", "bart")
ENDS = {"gpt2": (5, 21), "t5": (1, 22), "bart": (2, 30)}
START = {"t5": 3, "bart": 2}
SEEDS = {"gpt2": 2, "t5": 3, "bart": 12}
NEW = 7
# Options of transformers' generate.
SETTINGS = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.5},
    "two beams": {"num_beams": 2},
    "long texts": {"num_beams": 3, "length_penalty": 2.0, "early_stopping": "never"},
    "short texts": {"num_beams": 4, "length_penalty": -1.0, "early_stopping": True},
    "beams and penalty": {"num_beams": 3, "repetition_penalty": 1.3},
}
FEW = {"t5": ("greedy", "long texts"), "bart": ("penalty", "short texts")}


def settings_of(name):
    """Return the settings that a model is tested with."""
    return {key: SETTINGS[key] for key in FEW.get(name, SETTINGS)}


def draw_prompts(n=16, seed=0):
    """Return prompts of 2 to 7 tokens."""
    random = np.random.RandomState(seed)
    sizes = random.randint(2, 8, n)
    return [random.randint(9, 40, size).tolist() for size in sizes]


def write(folder, name):
    """Write the directory of a model, with tensors large enough to generate different
    texts; with those of heads_data.draw it would generate the same everywhere."""
    if name == "gpt2":
        shapes = json.loads((heads_data.DATA / "hf_heads.json").read_text())
        heads = shapes["gpt2"]["LMHeadModel"]["shapes"]
        made = heads_data.write(folder, "gpt2", "LMHeadModel", heads)
    else:
        # Untied, as a tied head would repeat the last token.
        layout = seq2seq_data.layouts()[{"t5": "t5_v1.1"}.get(name, name)]
        made = seq2seq_data.write(folder, layout["config"], layout["shapes"])
    random = np.random.RandomState(SEEDS[name])
    drawn = {}
    for key in sorted(made):
        tensor = random.randn(*made[key].shape).astype(np.float32)
        if key.endswith("bias") or "norm" in key or ".ln_" in key:
            tensor = 0.2 * tensor + (tensor.ndim == 1 and key.endswith("weight"))
        drawn[key] = tensor.astype(np.float32)
    shared = next((drawn[key] for key in drawn if key.endswith("shared.weight")), None)
    for key in drawn:
        if key.endswith("embed_tokens.weight"):
            drawn[key] = shared
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})
