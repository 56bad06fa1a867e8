# SPDX-License-Identifier: Apache-2.0
"""MLMLM: a pretrained masked language model completes triples with entity names.

Clouatre et al. 2021 (arXiv 2009.07058): RoBERTa-large, one pass per query, all entities
ranked by the mean likelihood of their pieces. Batch, rate and epochs are this package's
usual ones for finetuning; the article's could not be found. ARG: a size and smoke.

  --config.init_from=DIR, any masked LM
  --config.data.train=train.tsv --config.data.valid=dev.tsv: head, relation, tail
  [--config.data.entities=FILE], their names and texts (docs/graphs.md)
  [--config.task.disambiguate=8], pieces of the text to add if names are equal
  [--config.objective=mlmlm:score=mean_p], or sum_logp, instead of mean_logp
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base")
    config = c.finetuning(smoke, lr=3e-5, length=64)
    config.objective = "mlmlm"
    config.model.size = size
    return config
