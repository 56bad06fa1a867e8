# SPDX-License-Identifier: Apache-2.0
"""ELECTRA: a discriminator finds the tokens that a small generator replaced.

Clark et al. 2020 (arXiv 2003.10555), table 6, and google-research/electra,
configure_pretraining.py: loss weights 1 and 50, AdamW (0.9, 0.999), eps 1e-6, decay
0.01, warm-up 10,000 steps, dropout 0.1; small: batch 128 of 128 tokens, lr 5e-4, 1M
steps, generator a quarter as wide; base: batch 256 of 512, 2e-4, 766k, a third; large:
batch 2,048 of 512, 2e-4, 400k, a quarter, and 25% masked (the steps of base and large
are not in the repository, and quoted from memory of the table). WordPiece, 30,522
pieces, lower-cased; two segments in order, one text in twenty is short. ARG: tiny, mini
(not published, otherwise as small), small, base, large, smoke.

Differences: positions are drawn without replacement (with it: data.paper_compat=True),
and AdamW corrects its bias.
"""

from bertjax import config as c

RECIPES = {  # batch, length, lr, steps, generator's share of the width, masked
    "small": (128, 128, 5e-4, 1_000_000, 0.25, 0.15),
    "base": (256, 512, 2e-4, 766_000, 0.3333, 0.15),
    "large": (2048, 512, 2e-4, 400_000, 0.25, 0.25),
}


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="small", family="electra")
    batch, length, lr, steps, generator, rate = RECIPES.get(size, RECIPES["small"])
    config = c.base()
    config.objective = f"electra:generator={generator}"
    config.batch_size = batch
    config.total = c.duration(steps=steps)
    config.model.family = "electra"
    config.model.size = size
    config.data.length = length
    config.data.plan = "pairs"
    config.data.short_seq_prob = 0.05
    config.data.masking = "electra"
    config.data.mask_rate = rate
    config.data.tokenizer = "wordpiece"
    config.data.vocab_size = 30_522
    config.optim.lr = lr
    config.optim.wd = 0.01
    config.optim.warmup = c.duration(percent=100 * 10_000 / steps)
    return c.make_smoke(config) if smoke else config
