# SPDX-License-Identifier: Apache-2.0
"""DistilBERT: half the layers of a BERT, distilled from it token by token.

Sanh et al. 2019 (arXiv 1910.01108) and huggingface/transformers, examples/
research_projects/distillation/train.py: no token types, no pooler; it starts with every
other layer of the teacher (0, 2, 4, 7, 9, 11 of 12); 15% are masked, rare pieces more
often; loss 5 KL at temperature 2 over all tokens, 2 masked LM, 1 cosine; AdamW 5e-4
(0.9, 0.98), eps 1e-6, no decay, warm-up 5%, clipped at 5, 3 epochs of rows of up to 512
tokens, 5 at a time, 50 accumulated, on each of 8 GPUs (4,000 per step in the paper).

  --config.teacher=DIR [--config.init_layers= to start from random parameters]
  --config.objective=distil:kl=0,cosine=1 --config.data.masking=bert: no masks

ARG: tiny, mini, medium, base, large (half as deep as BERT's of these names), smoke.

Differences: the weights of the losses and the clip are halved, so that the masked LM
has weight 1; batch_size=2048, rows of 128 tokens as in bert.py.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base", family="distilbert")
    config = c.base()
    config.objective = "mlm+distil:temperature=2,kl=2.5,cosine=0.5"
    config.init_layers = "even"
    config.batch_size = 2048
    config.total = c.duration(epochs=3)
    config.model.family = "distilbert"
    config.model.size = size
    config.data.length = 128
    config.data.plan = "full_sentences"
    config.data.masking = "distilbert"
    config.data.tokenizer = "wordpiece"
    config.data.vocab_size = 30_522
    config.optim.lr = 5e-4
    config.optim.b2 = 0.98
    config.optim.wd = 0.0
    config.optim.clip = 2.5
    config.optim.warmup = c.duration(percent=5)
    return c.make_smoke(config) if smoke else config
