# SPDX-License-Identifier: Apache-2.0
"""Find passages that answer queries, by vectors; trained on pairs.

One encoder for both (Reimers and Gurevych 2019). Negatives are the other passages of
the batch, and one listed negative if the data has any (Karpukhin et al. 2020). Mean
pooling, cosines divided by 0.05, batch 64 at 2e-5 are sentence-transformers' usual
settings; DPR's are task.pooling=cls task.normalize=False task.temperature=1
batch_size=128. ARG: a size, smoke, and task=beir or msmarco, which set the metrics.

  --config.init_from=DIR --config.data.train=FOLDER --config.data.valid=FOLDER

FOLDER is in BEIR's layout. Tables also work, with the columns query, positive and
optionally negatives, or those of task.text, task.text_pair and task.label.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    named, arg = c.split_arg(arg, ("task",))
    size, smoke = c.read_arg(arg, size="base")
    config = c.finetuning(smoke, lr=2e-5, batch_size=64, length=256)
    config.objective = "retrieve"
    config.task.name = named.get("task", "")
    config.model.size = size
    return config
