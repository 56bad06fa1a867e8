# SPDX-License-Identifier: Apache-2.0
"""MacBERT: masked LM as correction (similar words instead of [MASK]), sentence order.

Cui et al. 2020 (arXiv 2004.13922), section 3.1: 15% in n-grams of 1 to 4 words with
probabilities 40, 30, 20 and 10%; of these 80% become a similar word, 10% a random one,
10% stay; sentence-order prediction. MacBERT's schedule is unpublished; batch, steps,
optimizer and rate are from its predecessor RoBERTa-wwm-ext (arXiv 1906.08101): batch
384 of 512 tokens, 1M steps, LAMB, 1e-4. data.similar is the table that bertjax.prepare
--similar=FILE writes; for Chinese add data.segmenter=jieba and bert-base-chinese's
vocabulary. ARG: a size, or smoke, which has no similar words.

Differences: warm-up and decay of the rate as in BERT; SOP is as in albert.py.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base")
    config = c.base()
    config.objective = "mlm+sop"
    config.batch_size = 384
    config.total = c.duration(steps=1_000_000)
    config.model.size = size
    config.data.length = 512
    config.data.plan = "pairs"
    config.data.masking = "macbert"
    config.data.tokenizer = "wordpiece"
    config.data.vocab_size = 30_522
    config.data.lower_case = True
    config.optim.name = "lamb"
    config.optim.lr = 1e-4
    if smoke:
        config = c.make_smoke(config)
        config.data.similar = "none"
    return config
