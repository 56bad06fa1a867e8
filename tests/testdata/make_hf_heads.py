# SPDX-License-Identifier: Apache-2.0
"""Write hf_heads.json: transformers' heads of tasks.

For each family and class it has the shapes of the tensors outside the encoder of
hf_layouts.json, and the logits of the model that tests/interop/heads_data.py draws.
Needs torch and transformers 5, which the tests do not.

    python tests/testdata/make_hf_heads.py
"""

import json
import sys
from pathlib import Path

import torch
import transformers as t

sys.path.append(str(Path(__file__).parents[1] / "interop"))
import heads_data as data

kinds = dict.fromkeys(data.FAMILIES, data.KINDS)
found = {}
for family, of_family in (kinds | data.CAUSAL).items():
    for kind in of_family:
        told = data.config_of(family, kind)
        config = t.AutoConfig.for_model(**told)
        model = getattr(t, told["architectures"][0])(config).eval()
        state = model.state_dict()
        known = data.encoder_shapes(family)
        head, word = "lm_head.weight", "transformer.wte.weight"
        tied = {head} if head in state and config.tie_word_embeddings else set()
        heads = {
            k: list(v.shape)
            for k, v in state.items()
            if k not in (*known, *tied) and not k.endswith("_ids")
        }
        made = {k: data.draw(k, v) for k, v in {**known, **heads}.items()}
        state |= {k: torch.tensor(v) for k, v in made.items()}
        if tied:
            state[head] = state[word]
        model.load_state_dict(state)
        batch = {"input_ids": data.IDS, "attention_mask": data.MASK}
        several = kind == "MultipleChoice"  # the rows are one example's choices
        with torch.inference_mode():
            batch = {
                k: torch.tensor(v[None] if several else v) for k, v in batch.items()
            }
            out = model(**batch)
        if kind == "QuestionAnswering":
            logits = torch.stack([out.start_logits, out.end_logits], dim=-1)
        else:
            logits = out.logits.reshape(-1, 1) if several else out.logits
        found.setdefault(family, {})[kind] = {
            "shapes": heads,
            "logits": logits.tolist(),
        }
text = json.dumps(found, indent=0, sort_keys=True)
Path(__file__).with_name("hf_heads.json").write_text(text + "\n")
