# SPDX-License-Identifier: Apache-2.0
"""Order passages that a search has found, by reading each together with the query (a
cross-encoder): pairs in, a model that scores.

A query is learnt with a passage that answers it and task.negatives others: those that
data.train gives (bertjax.evaluate --what=retrieval --mine=FILE finds hard ones), then
some of the collection. ARG: a size, smoke, and task=beir or msmarco, which say the
metrics.

  --config.init_from=DIR --config.data.train=mined.jsonl --config.data.valid=FOLDER

Tables have the columns query, positive and, if any, negatives; FOLDER is of BEIR's
layout.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    named, arg = c.split_arg(arg, ("task",))
    size, smoke = c.read_arg(arg, size="base")
    config = c.finetuning(smoke, lr=2e-5, batch_size=16, length=256)
    config.objective = "rerank"
    config.task.name = named.get("task", "")
    config.task.negatives = 4
    config.model.size = size
    return config
