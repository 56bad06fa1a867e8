# SPDX-License-Identifier: Apache-2.0
"""Write bert_golden.npz: small random BERTs of another implementation, and their
outputs. Needs torch and transformers (4.57), which the tests do not.

    python tests/testdata/make_bert_golden.py
"""

from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForPreTraining

MODELS = {
    "exact": dict(
        vocab_size=41, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=20, hidden_act="gelu",
    ),
    "tanh": dict(
        vocab_size=37, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=40, max_position_embeddings=16, hidden_act="gelu_new",
        layer_norm_eps=1e-5,
    ),
}  # fmt: skip


def main() -> None:
    arrays = {}
    for seed, (name, sizes) in enumerate(MODELS.items()):
        draw = np.random.default_rng(seed)
        model = BertForPreTraining(BertConfig(**sizes, attn_implementation="eager"))
        model.eval()
        with torch.no_grad():
            for key, p in model.named_parameters():
                centre = 1.0 if key.endswith("LayerNorm.weight") else 0.0
                value = centre + 0.3 * draw.standard_normal(p.shape)
                p.copy_(torch.from_numpy(value.astype(np.float32)))
                arrays[f"{name}/weights/{key}"] = p.numpy()
        rows, length = 3, 14
        lengths = np.array([length, 9, 4])
        inputs = {
            "input_ids": draw.integers(0, sizes["vocab_size"], (rows, length)),
            "attention_mask": (np.arange(length) < lengths[:, None]).astype(np.int64),
            "token_type_ids": (np.arange(length) >= lengths[:, None] // 2) * 1,
        }
        tensors = {k: torch.from_numpy(v) for k, v in inputs.items()}
        with torch.no_grad():
            out = model(**tensors)
            encoded = model.bert(**tensors)
        arrays |= {f"{name}/{k}": v.astype(np.int32) for k, v in inputs.items()}
        arrays[f"{name}/hidden"] = encoded.last_hidden_state.numpy()
        arrays[f"{name}/pooled"] = encoded.pooler_output.numpy()
        arrays[f"{name}/mlm_logits"] = out.prediction_logits.numpy()
        arrays[f"{name}/nsp_logits"] = out.seq_relationship_logits.numpy()
    np.savez_compressed(Path(__file__).with_name("bert_golden.npz"), **arrays)


if __name__ == "__main__":
    main()
