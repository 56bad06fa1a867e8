# SPDX-License-Identifier: Apache-2.0
"""Classify or score texts or pairs of texts from a table.

Devlin et al. 2019, section 4.1 and appendix A.3: batch 32, 3 epochs, 128 tokens, Adam
at one of 2e-5 to 5e-5, warm-up over a tenth of the steps. ARG: a size, smoke, and
task=NAME, a task of bertjax/tasks/catalog.py, such as task=rte. Otherwise

  --config.init_from=DIR --config.data.train=train.tsv --config.data.valid=dev.tsv
  --config.task.text=COLUMN --config.task.label=COLUMN [--config.task.text_pair=COLUMN]

and --config.objective=regress if the label is a score.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    named, arg = c.split_arg(arg, ("task",))
    size, smoke = c.read_arg(arg, size="base")
    config = c.finetuning(smoke, lr=3e-5)
    config.objective = "classify"
    config.task.name = named.get("task", "")
    config.model.size = size
    return config
