# SPDX-License-Identifier: Apache-2.0
"""Write answers from passages that a retriever found: retrieval-augmented generation.

Lewis et al. 2020 (RAG, arXiv 2005.11401): a generator maximizes the marginal likelihood
of a target over task.passages passages. With task.marginal=sequence one passage
explains a whole target, with token one explains each of its tokens. The retriever does
not train. ARG: a size, smoke.

  bertjax.embed   --model=RETRIEVER --text=corpus.jsonl --index=INDEX
  bertjax.predict --model=RETRIEVER --index=INDEX --input=asked.json --out=found.jsonl
  bertjax.train   --config=finetune/rag.py --config.init_from=DIR
                  --config.data.train=found.jsonl --config.data.valid=dev.jsonl

DIR is BART's or T5's, or any masked or causal LM, as for finetune/seq2seq.py. With
--config.task.index=INDEX, whose vectors DIR's encoder made, data.train has only
questions and answers: each step retrieves its passages, and the retriever trains too.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base")
    config = c.finetuning(smoke, lr=3e-5, batch_size=8, length=256)
    config.objective = "rag"
    config.task.target_length = 32
    config.model.size = size
    return config
