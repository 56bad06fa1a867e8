# SPDX-License-Identifier: Apache-2.0
"""Find passages by sparse vectors over the vocabulary (SPLADE): pairs in, a model
whose vectors an inverted index holds.

The masked-LM head makes the weights, so begin with a model that has one. The
regularisers' factors are task.query_flops and task.passage_flops: larger ones leave
fewer weights, as splade_query_active and splade_passage_active in metrics.jsonl say.
ARG: a size, smoke, and task=beir or msmarco, which say the metrics.

  --config.init_from=DIR --config.data.train=FOLDER --config.data.valid=FOLDER

FOLDER is of BEIR's layout, or a table of pairs, as of retrieve.py.
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
