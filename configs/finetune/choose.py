# SPDX-License-Identifier: Apache-2.0
"""Choose among continuations or answers: multiple choice from a table.

Devlin et al. 2019, section 4.4 (SWAG): 3 epochs, batch 16, Adam at 2e-5. ARG: a size,
smoke, and task=NAME: swag, hellaswag, race or copa. Otherwise

  --config.init_from=DIR --config.data.train=train.jsonl --config.data.valid=dev.jsonl
  --config.task.text=COLUMN --config.task.choices=COLUMN,... --config.task.label=COLUMN
  [--config.task.text_pair=COLUMN], a question that comes before each choice
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    named, arg = c.split_arg(arg, ("task",))
    size, smoke = c.read_arg(arg, size="base")
    config = c.finetuning(smoke, lr=2e-5, batch_size=16)
    config.objective = "choose"
    config.task.name = named.get("task", "")
    config.model.size = size
    return config
