# SPDX-License-Identifier: Apache-2.0
"""Texts and image regions in one encoder: UNITER's pretraining (docs/regions.md).

Chen et al. 2020 (arXiv 1909.11740), section 3 and appendix A.2: only words or only
regions are masked in a row, 15% of them; words, regions and pairs 2:2:2; Adam at 5e-5,
decay 0.01, dropout 0.1. Difference: a batch has a number of rows, not of tokens. ARG:
tiny, mini, small, medium, base, large, smoke.

  --config.data.train=train.jsonl --config.data.valid=dev.jsonl --config.data.vocab=DIR
  [--config.init_from=DIR]

Rows have `sentence` and `scenes`, lists of objects, or --config.task.regions=COLUMN
names an npz file per image.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base")
    config = c.base()
    config.objective = "regions"
    config.batch_size = 256
    config.total = c.duration(steps=200_000)
    config.model.size = size
    config.data.length = 64
    config.data.engine = "python"
    config.optim.lr = 5e-5
    config.optim.wd = 0.01
    config = c.make_smoke(config) if smoke else config
    config.data.train = config.data.valid = ""
    config.eval.examples = 0
    return config
