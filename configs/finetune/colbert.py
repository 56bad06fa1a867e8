# SPDX-License-Identifier: Apache-2.0
"""Find passages by a vector of every token, compared late (ColBERT): pairs in, a model
whose score of a passage is MaxSim.

Vectors have task.embedding_size numbers; scores are sums of cosines, which
task.temperature divides. ARG: a size, smoke, and task=beir or msmarco, which say the
metrics.

  --config.init_from=DIR --config.data.train=FOLDER --config.data.valid=FOLDER

FOLDER is of BEIR's layout, or a table of pairs, as of retrieve.py.
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
