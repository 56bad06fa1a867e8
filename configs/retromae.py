# SPDX-License-Identifier: Apache-2.0
"""RetroMAE: a pretrained masked LM trains its first vector for retrieval.

Xiao et al. 2022 (arXiv 2205.12035) and staoxiao/RetroMAE, examples/pretrain/README.md:
from bert-base-uncased, 8 epochs of Wikipedia and BookCorpus, batch 256 of up to 512
tokens, AdamW 1e-4, decay 0.01, warm-up 10%; whole words, 30% masked for the encoder and
50% hidden from the one-layer decoder. A second run trains on the passages to be found:
1,024 rows of 150 tokens, 20 epochs.

  --config.init_from=DIR --config.data.train=... [--config.data.length=150]

Finetune the result by finetune/retrieve.py with task.pooling=cls. ARG: a size, smoke.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base")
    config = c.base()
    config.objective = "retromae:decoder_rate=0.5"
    config.batch_size = 256
    config.total = c.duration(epochs=8)
    config.model.size = size
    config.data.length = 512
    config.data.plan = "doc_sentences"
    config.data.mask_rate = 0.3
    config.data.mask_unit = "word"
    config.data.tokenizer = "wordpiece"
    config.data.vocab_size = 30_522
    config.data.lower_case = True
    config.optim.lr = 1e-4
    config.optim.wd = 0.01
    config.optim.warmup = c.duration(percent=10)
    return c.make_smoke(config) if smoke else config
