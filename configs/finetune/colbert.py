# SPDX-License-Identifier: Apache-2.0
"""Find passages by late interaction of token vectors (ColBERT), trained on pairs.

The score of a passage is MaxSim: sums of cosines of token vectors, divided by
task.temperature. Vectors have task.embedding_size numbers. ARG: a size, smoke, and
task=beir or msmarco, which set the metrics.

  --config.init_from=DIR --config.data.train=FOLDER --config.data.valid=FOLDER

FOLDER is in BEIR's layout; or give a table of pairs, as for retrieve.py.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    named, arg = c.split_arg(arg, ("task",))
    size, smoke = c.read_arg(arg, size="base")
    config = c.finetuning(smoke, lr=1e-5, batch_size=32, length=256)
    config.objective = "colbert"
    config.task.name = named.get("task", "")
    config.task.temperature = 1.0
    config.model.size = size
    return config
