# SPDX-License-Identifier: Apache-2.0
"""Tag words, with named entities for instance: files of columns in, a model out.

Devlin et al. 2019, section 5.3 (the first piece of each word, no CRF) with the
settings of appendix A.3: batch 32, 3 epochs, Adam at 5e-5, warm-up over a tenth of the
steps. Take a cased vocabulary where names are looked for. ARG: a size, smoke.

  --config.init_from=DIR --config.data.train=train.bio --config.data.valid=dev.bio

Columns have numbers in .bio, .conll and .txt, names in .jsonl.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base")
    config = c.base()
    config = c.make_smoke(config) if smoke else config
    config.objective = "tag"
    config.data.train = config.data.valid = ""
    config.task.text = "1"  # the first column, and `tokens` in JSON lines
    config.task.label = "-1"  # the last one, and `tags`
    config.model.size = size
    config.total = c.duration(epochs=3)
    config.batch_size = 32
    config.data.length = 128
    config.data.engine = "python"
    config.optim.lr = 5e-5
    config.optim.warmup = c.duration(percent=10)
    config.eval.every = c.duration(epochs=1)
    config.eval.examples = 0  # all
    config.checkpoint.every = c.duration(epochs=1)
    config.log.every = c.duration(steps=1 if smoke else 10)
    return config
