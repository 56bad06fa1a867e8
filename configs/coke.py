# SPDX-License-Identifier: Apache-2.0
"""CoKE: triples of a knowledge graph, and paths, completed by a small encoder.

Wang et al. 2019 (arXiv 1911.02168) and PaddlePaddle/Research, KG/CoKE: 12 layers of
256, 4 heads, an MLP of 512; batches of 512 sequences, Adam at 5e-4 with a linear decay
after a tenth of the steps, decay 0.01, weights averaged with 0.9999. ARG wn18rr: 1,000
epochs, dropout 0.3 (0.1 in its script), the right entity's share of the target 0.15;
fb15k237: 500 epochs, 0.5, 0.25. Further ARGs: tiny, mini, small, smoke. Ours: their
hidden state is multiplied by the entity that is given (`product`, docs/graphs.md), a
question is learnt once an epoch with up to 64 of its answers, and they learn at a
higher rate, for few epochs.

  --config.data.train=train.tsv --config.data.valid=dev.tsv: head, relation, tail
  [--config.data.entities=FILE], what they are called (docs/graphs.md)
  [--config.task.paths=3], paths of two and three relations too

Ours: 32 triples share a row of 96 tokens, 16 rows (8 of tiny, mini, small) are a step;
the softmax is over entities alone, without relations; a path begins with a triple of
the training set.
"""

from bertjax import config as c

SIZES = {  # layers, width, heads, MLP, epochs, dropout, the right entity's share, rate
    "tiny": (2, 64, 2, 128, 40, 0.1, 1.0, 4e-3),
    "mini": (2, 128, 4, 256, 40, 0.2, 1.0, 4e-3),
    "small": (4, 256, 4, 512, 40, 0.2, 1.0, 1e-3),
    "wn18rr": (12, 256, 4, 512, 1_000, 0.3, 0.15, 5e-4),
    "fb15k237": (12, 256, 4, 512, 500, 0.5, 0.25, 5e-4),
}
OURS = "tiny", "mini", "small"
VOCABULARY = {"fb15k237": 14_541 + 237}  # where no triples say it; else WN18RR's


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="wn18rr", sizes=SIZES)
    layers, width, heads, mlp, epochs, dropout, gold, lr = SIZES[size]
    config = c.finetuning(smoke, lr=lr, batch_size=16, epochs=epochs, length=96)
    config.objective = f"complete:gold={gold:g}"
    if size in OURS:
        config.objective += ",product=True"
        config.task.answers = 64
        config.batch_size = 8
    config.model.num_hidden_layers = layers
    config.model.hidden_size = width
    config.model.num_attention_heads = heads
    config.model.intermediate_size = mlp
    config.model.type_vocab_size = 0
    config.model.max_position_embeddings = 512
    config.model.hidden_dropout_prob = dropout
    config.model.attention_probs_dropout_prob = 0.1 if size in OURS else dropout
    config.data.vocab_size = 5 + VOCABULARY.get(size, 40_943 + 11)
    if smoke:
        return config
    config.optim.ema = 0.999 if size in OURS else 0.9999
    config.eval.every = c.duration(percent=2)
    config.checkpoint.every = c.duration(percent=2)
    config.log.every = c.duration(steps=100)
    return config
