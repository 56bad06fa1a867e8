# SPDX-License-Identifier: Apache-2.0
"""Write hf_layouts.json: transformers' files of a small model of each family.

For each it has config.json, and the shapes in model.safetensors by name. Needs torch
and transformers 5, which the tests do not.

    python tests/testdata/make_hf_layouts.py
"""

import json
import tempfile
from pathlib import Path

import transformers as t
from safetensors import safe_open

SMALL = dict(
    vocab_size=40,
    hidden_size=8,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=12,
    max_position_embeddings=20,
)
GPT2 = dict(vocab_size=40, n_embd=8, n_layer=3, n_head=2, n_positions=20)
MODELS = {
    "bert": t.BertForPreTraining(t.BertConfig(**SMALL)),
    "bert_bare": t.BertModel(t.BertConfig(**SMALL)),
    "roberta": t.RobertaForMaskedLM(
        t.RobertaConfig(
            **SMALL, pad_token_id=1, bos_token_id=2, eos_token_id=3, type_vocab_size=1
        )
    ),
    "xlm-roberta": t.XLMRobertaForMaskedLM(
        t.XLMRobertaConfig(
            **SMALL, pad_token_id=1, bos_token_id=2, eos_token_id=3, type_vocab_size=1
        )
    ),
    "camembert": t.CamembertForMaskedLM(
        t.CamembertConfig(
            **SMALL, pad_token_id=1, bos_token_id=2, eos_token_id=3, type_vocab_size=1
        )
    ),
    "albert": t.AlbertForPreTraining(
        t.AlbertConfig(
            **SMALL,
            embedding_size=4,
            num_hidden_groups=2,
            pad_token_id=1,
            bos_token_id=2,
            eos_token_id=3,
        )
    ),
    "electra": t.ElectraForMaskedLM(t.ElectraConfig(**SMALL, embedding_size=4)),
    "electra_discriminator": t.ElectraForPreTraining(
        t.ElectraConfig(**SMALL, embedding_size=8)
    ),
    "distilbert": t.DistilBertForMaskedLM(
        t.DistilBertConfig(
            vocab_size=40,
            dim=8,
            n_layers=3,
            n_heads=2,
            hidden_dim=12,
            max_position_embeddings=20,
        )
    ),
    "mpnet": t.MPNetForMaskedLM(
        t.MPNetConfig(**SMALL, pad_token_id=1, bos_token_id=2, eos_token_id=3)
    ),
    "modernbert": t.ModernBertForMaskedLM(
        t.ModernBertConfig(
            **SMALL,
            local_attention=4,
            pad_token_id=1,
            bos_token_id=2,
            eos_token_id=3,
            cls_token_id=2,
            sep_token_id=3,
        )
    ),
    "modernbert_untied": t.ModernBertForMaskedLM(
        t.ModernBertConfig(
            **SMALL,
            tie_word_embeddings=False,
            norm_bias=True,
            attention_bias=True,
            mlp_bias=True,
            classifier_bias=True,
            pad_token_id=1,
            bos_token_id=2,
            eos_token_id=3,
            cls_token_id=2,
            sep_token_id=3,
        )
    ),
    "gpt2": t.GPT2LMHeadModel(
        t.GPT2Config(**GPT2, pad_token_id=1, bos_token_id=2, eos_token_id=3)
    ),
    "gpt2_untied": t.GPT2LMHeadModel(
        t.GPT2Config(
            **GPT2,
            n_inner=12,
            activation_function="gelu",
            tie_word_embeddings=False,
            pad_token_id=1,
            bos_token_id=2,
            eos_token_id=3,
        )
    ),
}
found = {}
for name, model in MODELS.items():
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        with safe_open(f"{folder}/model.safetensors", "np") as file:
            shapes = {k: file.get_slice(k).get_shape() for k in file.keys()}  # noqa: SIM118
    found[name] = {"config": config, "shapes": shapes}
Path(__file__).with_name("hf_layouts.json").write_text(
    json.dumps(found, indent=0, sort_keys=True) + "\n"
)
