# SPDX-License-Identifier: Apache-2.0
"""Rerank passages that a search found, each read together with the query.

This cross-encoder trains each query with one passage that answers it and task.negatives
others: first those that data.train lists (bertjax.evaluate --what=retrieval --mine=FILE
finds hard ones), then some of the collection. ARG: a size, smoke, and task=beir or
msmarco, which set the metrics.

  --config.init_from=DIR --config.data.train=mined.jsonl --config.data.valid=FOLDER

Tables have the columns query, positive and optionally
negatives; FOLDER is in BEIR's layout.
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
