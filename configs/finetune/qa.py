# SPDX-License-Identifier: Apache-2.0
"""Answer questions by a span of a context, from SQuAD's JSON.

Devlin et al. 2019, sections 4.2 and 4.3, with google-research/bert's run_squad.py: rows
of 384 that start 128 pieces apart, questions of up to 64, batch 32, 2 epochs, Adam at
5e-5, warm-up over a tenth of the steps. ARG: a size, smoke, and task=squad or squad2
from TensorFlow Datasets. Otherwise

  --config.init_from=DIR --config.data.train=train.json --config.data.valid=dev.json
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    named, arg = c.split_arg(arg, ("task",))
    size, smoke = c.read_arg(arg, size="base")
    config = c.finetuning(smoke, lr=5e-5, epochs=2, length=384)
    config.objective = "span"
    config.task.name = named.get("task", "")
    config.model.size = size
    return config
