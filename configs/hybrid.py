# SPDX-License-Identifier: Apache-2.0
"""GPT-BERT: one stack trains on masked and causal prediction, 15 rows to 1.

Charpentier and Samuel 2024 (BabyLM), ltgoslo/gpt-bert, configs and train_10m.py: masked
next-token prediction in 15 of 16 rows and causal prediction in one; the loss averages
the two, weighted by their shares of the rows; the mask rate falls from 0.30 to 0.15
over the run; 80/10/10, spans of 1 to 3 tokens; z-loss 1e-4; LAMB 1.41e-2 (0.9, 0.98),
decay 0.1, clipped at 2, warm-up 1.6%; 128 tokens for 70% of the run, 256 for 20%, then
512, with a constant number of tokens per step; weights averaged with 0.999; BPE of
8,192 (small) or 16,384 pieces. ARG: small (12 layers of 384), base (12 of 768), tiny,
mini (not published), smoke.

Differences: their steps have 4.2M tokens at the end, those of batch_size=1024 here
131,072. Their model has relative positions with both cross terms, gates and learned
sums of earlier layers; this is a pre-norm stack with rotary positions and a gated MLP,
fully bidirectional in the masked rows. Its matrices are drawn from a normal
distribution with deviation 0.02; the rate falls by a cosine to 0.
"""

from bertjax import config as c

SIZES = {  # layers, width, heads, MLP
    "tiny": (2, 128, 2, 384),
    "mini": (4, 256, 4, 768),
    "small": (12, 384, 6, 1280),
    "base": (12, 768, 12, 2560),
}


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="small", sizes=SIZES)
    layers, width, heads, mlp = SIZES[size]
    config = c.base()
    config.objective = "mntp:z_loss=1e-4*15+clm:z_loss=1e-4*1"
    config.batch_size = 1024
    config.total = c.duration(steps=10_000)
    config.model.family = "modernbert"
    config.model.num_hidden_layers = layers
    config.model.hidden_size = width
    config.model.num_attention_heads = heads
    config.model.intermediate_size = mlp
    config.model.max_position_embeddings = 512
    config.model.local_attention = 0
    config.model.local_rope_theta = 0.0
    config.model.global_attn_every_n_layers = 0
    config.model.rope_theta = 10_000.0
    config.model.hidden_dropout_prob = 0.1
    config.model.attention_probs_dropout_prob = 0.1
    config.data.length = 128
    config.data.plan = "full_sentences"
    config.data.masking = "bert"
    config.data.mask_rate = "0.3:0.15"
    config.data.mask_lengths = "0.34,0.33,0.33"
    config.data.tokenizer = "byte_bpe"
    config.data.vocab_size = 8_192 if size == "small" else 16_384
    config.optim.name = "lamb"
    config.optim.lr = 1.41e-2 if size == "small" else 1e-2
    config.optim.b2 = 0.98
    config.optim.eps = 1e-8
    config.optim.wd = 0.1
    config.optim.clip = 2.0
    config.optim.schedule = "cosine"
    config.optim.warmup = c.duration(percent=1.6)
    config.optim.ema = 0.999
    if smoke:
        config = c.make_smoke(config)
        config.batch_size, config.optim.name, config.optim.ema = 16, "adamw", 0.0
        return config
    # Each phase continues the fall of the mask rate.
    config.phases = (
        "percent=70 mask_rate=0.3:0.195; "
        "percent=20 length=256 batch_size=512 mask_rate=0.195:0.165; "
        "length=512 batch_size=256 mask_rate=0.165:0.15"
    )
    return config
