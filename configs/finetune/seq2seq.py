# SPDX-License-Identifier: Apache-2.0
"""Write a target for a text: summaries, questions, sentences for tables of facts.

Dong et al. 2019 (UniLM), section 3: batch 32, Adam at 1e-5 to 3e-5 for large models,
warm-up over a tenth of the steps, here 3 epochs; rows of 256, of which 64 are for the
target. ARG: a size and smoke.

  --config.init_from=DIR --config.data.train=train.jsonl --config.data.valid=dev.jsonl
  [--config.task.text=COLUMN] [--config.task.target=COLUMN], default `text`, `target`
  [--config.task.text_pair=COLUMN], a second text
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base")
    config = c.finetuning(smoke, lr=3e-5, length=256)
    config.objective = "seq2seq"
    config.model.size = size
    return config
