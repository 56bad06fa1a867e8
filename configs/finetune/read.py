# SPDX-License-Identifier: Apache-2.0
"""Train retriever and reader together to answer questions from a collection.

REALM's and ORQA's marginal likelihood over the spans of task.passages passages (Guu et
al. 2020, arXiv 2002.08909; Lee et al. 2019). ARG: a size, smoke.

  bertjax.embed   --model=DIR --text=corpus.jsonl --index=INDEX
  bertjax.predict --model=DIR --index=INDEX --input=questions.json --out=found.jsonl
  bertjax.train   --config=finetune/read.py --config.init_from=DIR
                  --config.data.train=found.jsonl --config.task.index=INDEX

Without task.index the retriever does not train, and passages keep the scores of the
file. docs/retrieval.md walks through all of it.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base")
    config = c.finetuning(smoke, lr=3e-5, epochs=2, batch_size=8, length=256)
    config.objective = "read"
    config.task.candidates = 20
    config.model.size = size
    return config
