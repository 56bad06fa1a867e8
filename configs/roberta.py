# SPDX-License-Identifier: Apache-2.0
"""RoBERTa: masked LM on full sentences, no sentence pairs, large batches.

Liu et al. 2019 (arXiv 1907.11692), table 9: batch 8,192, 500k steps of 512 tokens,
lr 6e-4 (base) or 4e-4 (large), warm-up 24k or 30k, Adam (0.9, 0.98), eps 1e-6,
decay 0.01, no clipping, dropout 0.1; byte-level BPE of 50k pieces. ARG: a size, or
smoke. Difference: special tokens are never selected for masking;
data.paper_compat=True selects them too.
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base")
    large = size == "large"
    config = c.base()
    config.objective = "mlm"
    config.batch_size = 8192
    config.total = c.duration(steps=500_000)
    config.model.size = size
    config.model.type_vocab_size = 0
    config.model.layer_norm_eps = 1e-5
    config.data.length = 512
    config.data.plan = "full_sentences"
    config.data.masking = "roberta"
    config.data.tokenizer = "byte_bpe"
    config.data.vocab_size = 50_265
    config.optim.lr = 4e-4 if large else 6e-4
    config.optim.b2 = 0.98
    config.optim.clip = 0.0
    config.optim.warmup = c.duration(percent=6.0 if large else 4.8)
    return c.make_smoke(config) if smoke else config
