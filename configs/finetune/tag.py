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
    config = c.finetuning(smoke, lr=5e-5)
    config.objective = "tag"
    config.task.text = "1"  # the first column, and `tokens` in JSON lines
    config.task.label = "-1"  # the last one, and `tags`
    config.model.size = size
    return config
