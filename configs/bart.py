# SPDX-License-Identifier: Apache-2.0
"""BART: an encoder reads a corrupted text, a decoder writes the original.

Lewis et al. 2020 (arXiv 1910.13461), sections 2 and 4: sentences are permuted, and
30% of the words are in spans of Poisson lengths, each of which becomes one mask;
batch 8,000, 500k steps of 512 tokens, dropout 0.1; RoBERTa's vocabulary. The paper
does not give everything. From fairseq's recipe (issue 1899 of its repository): a
mean length of 3.5, random pieces for a tenth of the masks, lr 4e-4. As in RoBERTa:
warm-up 10,000 steps, Adam (0.9, 0.98), eps 1e-6, decay 0.01. ARG: base, large;
tiny, mini (not published); smoke.

Differences: batch 8,192; dropout stays to the end, where BART dropped it for the last
tenth; spans do not overlap, so exactly 30% of the words are hidden; a sentence ends at
any period, question or exclamation mark (data.noise, docs/data.md).
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
