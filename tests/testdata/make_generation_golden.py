# SPDX-License-Identifier: Apache-2.0
"""Write generation_golden.json: ids of transformers' generate with small models.

The models, prompts and settings are those of tests/generation/small_models.py. Needs
torch and transformers 5, which the tests do not.

    python tests/testdata/make_generation_golden.py
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers as t

sys.path.append(str(Path(__file__).parents[1] / "generation"))
import small_models as small

found = {}
for name in small.NAMES:
    kind = t.AutoModelForSeq2SeqLM if name in small.START else t.AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as folder:
        small.write(Path(folder), name)
        model = kind.from_pretrained(folder).eval()
    model.generation_config = t.GenerationConfig(
        pad_token_id=0,
        eos_token_id=[*small.ENDS[name]],
        decoder_start_token_id=small.START.get(name),
    )
    found[name] = {}
    for setting, options in small.settings_of(name).items():
        beams = options.get("num_beams", 1)
        texts = []
        for prompt in small.draw_prompts():
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                written = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=small.NEW,
                    do_sample=False,
                    num_return_sequences=min(beams, 2),
                    **options,
                )
            begun = 1 if name in small.START else len(prompt)
            for row in written[:, begun:].tolist():
                ends = [i for i, x in enumerate(row) if x in small.ENDS[name]]
                texts.append(row[: ends[0] + 1] if ends else row)
        found[name][setting] = texts
Path(__file__).with_name("generation_golden.json").write_text(
    json.dumps(found, separators=(",", ":"), sort_keys=True) + "\n"
)
