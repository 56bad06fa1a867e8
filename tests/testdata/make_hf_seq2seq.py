# SPDX-License-Identifier: Apache-2.0
"""Write hf_seq2seq.json: small encoder-decoders as transformers writes and runs them.

For each it has config.json, the shapes in model.safetensors by name, and the logits of
the model that tests/interop/seq2seq_data.py draws, opened from such a directory. Needs
torch and transformers 5, which the tests do not.

    python tests/testdata/make_hf_seq2seq.py
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers as t
from safetensors import safe_open

sys.path.append(str(Path(__file__).parents[1] / "interop"))
import seq2seq_data as data

SIZES = dict(
    vocab_size=40, d_model=8, d_kv=4, d_ff=12, num_layers=3, num_heads=2
)  # fmt: skip
SIZES |= dict(relative_attention_num_buckets=6, relative_attention_max_distance=8)
BART = dict(
    vocab_size=40,
    d_model=8,
    encoder_layers=3,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=12,
    decoder_ffn_dim=12,
    max_position_embeddings=20,
)
HEAD = {"lm_head.weight": [40, 8]}  # untied, although transformers' config.json ties it
# Name -> (config, tensors of released files that transformers does not write).
CONFIGS = {
    "t5": (t.T5Config(**SIZES, num_decoder_layers=2, decoder_start_token_id=0), {}),
    "t5_gelu_untied": (
        t.T5Config(**SIZES, feed_forward_proj="gelu", decoder_start_token_id=0),
        HEAD,
    ),
    "t5_v1.1": (
        t.T5Config(
            **SIZES,
            num_decoder_layers=1,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
            decoder_start_token_id=0,
        ),
        HEAD,
    ),
    "t5_v1.1_tied": (
        t.T5Config(
            **SIZES,
            feed_forward_proj="gated-silu",
            tie_word_embeddings=False,
            decoder_start_token_id=0,
        ),
        {},
    ),
    "bart": (t.BartConfig(**BART), {}),
    "bart_untied": (
        t.BartConfig(**BART, tie_word_embeddings=False, activation_function="relu"),
        {},
    ),
    "mbart": (t.MBartConfig(**BART, decoder_start_token_id=0), {}),
}

found = {}
for name, (config, more) in CONFIGS.items():
    with tempfile.TemporaryDirectory() as folder:
        t.AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)
        told = json.loads((Path(folder) / "config.json").read_text())
        with safe_open(f"{folder}/model.safetensors", "np") as file:
            shapes = {k: file.get_slice(k).get_shape() for k in file.keys()}  # noqa: SIM118
        shapes |= more
        data.write(Path(folder), told, shapes)
        model = t.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        batch = {k: torch.tensor(v, dtype=torch.long) for k, v in data.BATCH.items()}
        logits = model(**batch).logits
    rounded = [float(f"{x:.7g}") for x in logits.flatten().tolist()]
    found[name] = {"config": told, "shapes": shapes, "logits": rounded}
text = json.dumps(found, indent=0, sort_keys=True)
Path(__file__).with_name("hf_seq2seq.json").write_text(text + "\n")
