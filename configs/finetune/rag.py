# SPDX-License-Identifier: Apache-2.0
"""Write answers out of passages that a retriever found: retrieval-augmented generation.

Lewis et al. 2020 (RAG, arXiv 2005.11401): a generator learns the marginal likelihood of
a target over task.passages passages, of which task.marginal=sequence takes one for a
whole target, and token one for each of its tokens. The retriever stays as it is. ARG: a
size, smoke.

  bertjax.embed   --model=RETRIEVER --text=corpus.jsonl --index=INDEX
  bertjax.predict --model=RETRIEVER --index=INDEX --input=asked.json --out=found.jsonl
  bertjax.train   --config=finetune/rag.py --config.init_from=DIR
                  --config.data.train=found.jsonl --config.data.valid=dev.jsonl

DIR is BART's or T5's, or any masked or causal LM, as of finetune/seq2seq.py. With
--config.task.index=INDEX, of vectors that DIR's encoder made, data.train has questions
and answers alone: each step finds its passages, and what finds them learns too.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base")
    config = c.finetuning(smoke, lr=3e-5, batch_size=8, length=256)
    config.objective = "rag"
    config.task.target_length = 32
    config.model.size = size
    return config
