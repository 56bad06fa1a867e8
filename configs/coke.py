# SPDX-License-Identifier: Apache-2.0
"""CoKE: a small encoder completes triples and paths of a knowledge graph.

Wang et al. 2019 (arXiv 1911.02168) and PaddlePaddle/Research, KG/CoKE: 12 layers of
256, 4 heads, an MLP of 512; batches of 512 sequences, Adam at 5e-4 with a linear decay
after a tenth of the steps, decay 0.01, weights averaged with 0.9999. ARG wn18rr: 1,000
epochs, dropout 0.3 (0.1 in its script), a target share of 0.15 for the right entity;
fb15k237: 500 epochs, 0.5, 0.25. Further ARGs: tiny, mini, small, smoke. Sizes tiny,
mini and small are not published: the hidden state is multiplied by the embedding of the
given entity (`product`, docs/graphs.md), a question appears once per epoch with up to
64 of its answers, and they train for few epochs at a higher rate.

  --config.data.train=train.tsv --config.data.valid=dev.tsv: head, relation, tail
  [--config.data.entities=FILE], their names (docs/graphs.md)
  [--config.task.paths=3], paths of two and three relations too

Differences: 32 triples share a row of 96 tokens, and a step has 16 rows (tiny, mini,
small: 8); the softmax is over entities alone, without relations; a path begins with a
triple of the training set.
"""

from bertjax import config as c

SIZES = {  # layers, width, heads, MLP, epochs, dropout, share of the right entity, rate
    "tiny": (2, 64, 2, 128, 40, 0.1, 1.0, 4e-3),
    "mini": (2, 128, 4, 256, 40, 0.2, 1.0, 4e-3),
    "small": (4, 256, 4, 512, 40, 0.2, 1.0, 1e-3),
    "wn18rr": (12, 256, 4, 512, 1_000, 0.3, 0.15, 5e-4),
    "fb15k237": (12, 256, 4, 512, 500, 0.5, 0.25, 5e-4),
}
OURS = "tiny", "mini", "small"
# if no triples tell its size; WN18RR's for the others
VOCABULARY = {"fb15k237": 14_541 + 237}


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
