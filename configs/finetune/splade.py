# SPDX-License-Identifier: Apache-2.0
"""Find passages by sparse vectors over the vocabulary (SPLADE), trained on pairs.

The vectors suit an inverted index. The masked-LM head computes the weights, so start
from a model that has one. task.query_flops and task.passage_flops are the regularizers'
factors: larger ones leave fewer weights, which metrics.jsonl counts as
splade_query_active and splade_passage_active. ARG: a size, smoke, and task=beir or
msmarco, which set the metrics.

  --config.init_from=DIR --config.data.train=FOLDER --config.data.valid=FOLDER

FOLDER is in BEIR's layout; or give a table of pairs, as for retrieve.py.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    named, arg = c.split_arg(arg, ("task",))
    size, smoke = c.read_arg(arg, size="base")
    config = c.finetuning(smoke, lr=2e-5, batch_size=32, length=256)
    config.objective = "splade"
    config.task.name = named.get("task", "")
    config.task.temperature = 1.0
    config.model.size = size
    return config
