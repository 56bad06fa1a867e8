# SPDX-License-Identifier: Apache-2.0
"""Small encoder-decoders; a tensor's name determines its values."""

import json
import re

import numpy as np
from heads_data import DATA, draw
from safetensors.numpy import save_file

IDS = np.array([[2, 9, 10, 11, 12, 3], [2, 13, 14, 3, 0, 0]], np.int32)
# Both rows of the decoder's side are full, as outputs at padding do not matter.
BATCH = {
    "input_ids": IDS,
    "attention_mask": (IDS > 0).astype(np.int32),
    "decoder_input_ids": np.array(
        [[0, 17, 5, 30, 21, 8, 8, 7, 6, 22], [0, 4, 33, 19, 2, 25, 9, 9, 31, 16]],
        np.int32,
    ),
}


def layouts():
    """Return the contents of the file that testdata/make_hf_seq2seq.py wrote."""
    return json.loads((DATA / "hf_seq2seq.json").read_text())


def write(folder, config, shapes, change=None):
    """Write a directory of drawn tensors and return them. Encoder and decoder share one
    table of embeddings."""
    folder.mkdir(exist_ok=True)
    made = {
        name: draw(re.sub("(en|de)coder.embed_tokens", "shared", name), shape)
        for name, shape in shapes.items()
    }
    made = change(made) if change else made
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return made
