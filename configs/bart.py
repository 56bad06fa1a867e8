# SPDX-License-Identifier: Apache-2.0
"""BART: an encoder reads a corrupted text, a decoder writes it as it was.

Lewis et al. 2020 (arXiv 1910.13461), sections 2 and 4: sentences change places, 30% of
the words lie in spans that are a mask each, of lengths of a Poisson law; batch 8,000,
500k steps of 512 tokens, dropout 0.1; pieces as RoBERTa's. What the paper leaves open
is fairseq's recipe (issue 1899 of its repository): a mean of 3.5, a tenth of the masks
random pieces, lr 4e-4; the rest is RoBERTa's, warm-up 10,000 steps, Adam (0.9, 0.98),
eps 1e-6, decay 0.01. ARG: base, large; tiny, mini (ours); smoke. Ours: batch 8,192;
dropout stays to the end, where BART's ended for the last tenth; spans do not overlap,
so that exactly 30% of the words are hidden; a sentence ends at any full stop, question
or exclamation mark (data.noise, docs/data.md).
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base", family="bart")
    config = c.base()
    config.objective = "denoise"
    config.batch_size = 8192
    config.total = c.duration(steps=500_000)
    config.model.family = "bart"
    config.model.size = size
    config.data.length = 512
    config.data.plan = "full_sentences"
    config.data.noise = "permute,infill:poisson:3.5:0.3:0.1"
    config.data.mask_unit = "word"
    config.data.tokenizer = "byte_bpe"
    config.data.vocab_size = 50_265
    config.optim.lr = 4e-4
    config.optim.b2 = 0.98
    config.optim.clip = 0.1
    config.optim.warmup = c.duration(percent=2)
    if size in ("tiny", "mini"):
        config.batch_size = 128
        config.total = c.duration(steps=100_000)
        config.optim.lr = 1e-3
        config.optim.clip = 1.0
    return c.make_smoke(config) if smoke else config
