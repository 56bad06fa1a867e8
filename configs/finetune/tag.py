# SPDX-License-Identifier: Apache-2.0
"""Tag words, for instance with named entities, from files of columns.

Devlin et al. 2019, section 5.3 (the first piece of each word, no CRF) with the
settings of appendix A.3: batch 32, 3 epochs, Adam at 5e-5, warm-up over a tenth of the
steps. Use a cased vocabulary for names. ARG: a size, smoke, and task=conll2003 from
TensorFlow Datasets. Otherwise

  --config.init_from=DIR --config.data.train=train.bio --config.data.valid=dev.bio

and --config.task.text=COLUMN --config.task.label=COLUMN unless they are the first and
the last, or `tokens` and `tags`: numbers in .bio, .conll and .txt, names in .jsonl.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    named, arg = c.split_arg(arg, ("task",))
    size, smoke = c.read_arg(arg, size="base")
    config = c.finetuning(smoke, lr=5e-5)
    config.objective = "tag"
    config.task.name = named.get("task", "")
    config.model.size = size
    return config
