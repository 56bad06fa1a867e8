# SPDX-License-Identifier: Apache-2.0
"""Answer questions out of a collection: passages that a retriever found are read, and
what finds them and what reads them learn together.

REALM's and ORQA's marginal likelihood over the spans of task.passages passages (Guu et
al. 2020, arXiv 2002.08909; Lee et al. 2019). ARG: a size, smoke.

  bertjax.embed   --model=DIR --text=corpus.jsonl --index=INDEX
  bertjax.predict --model=DIR --index=INDEX --input=questions.json --out=found.jsonl
  bertjax.train   --config=finetune/read.py --config.init_from=DIR
                  --config.data.train=found.jsonl --config.task.index=INDEX

Without task.index the retriever stays as it is, and passages have the scores of the
file. docs/retrieval.md goes through all of it.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base")
    config = c.finetuning(smoke, lr=3e-5, epochs=2, batch_size=8, length=256)
    config.objective = "read"
    config.task.candidates = 20
    config.model.size = size
    return config
