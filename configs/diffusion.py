# SPDX-License-Identifier: Apache-2.0
"""Masked diffusion: mask a text at any rate from 0 to 1, predict all masks at once.

Sahoo et al. 2024 (MDLM), kuleshov-group/mdlm, configs: 12 layers of 768, pre-LN without
biases, rotary positions, an MLP of GELU (tanh), a separate output matrix, dropout 0.1;
512 rows of 1,024 tokens per step, GPT-2's vocabulary; Adam 3e-4, constant after 2,500
steps, no decay, clipped at 1, weights averaged with 0.9999; 1M steps. ARG: base, and
tiny, mini, small, medium, large by BERT's sizes; smoke.

Differences: no conditioning on the time, to which MDLM feeds zeros; matrices are
drawn from a normal distribution with deviation 0.02; rates are spread over
neighboring rows of the run, not over a batch; a row begins with [CLS], its documents
end with [SEP], and neither is masked.

Variants:
  objective=diffusion:weights=llada                as LLaDA
  objective=diffusion:schedule=cosine              the BabyLM entry of 2025
  objective=diffusion:block=16,low=0.3,high=0.8    BD3-LM, whose rows hold their text
                                                   twice: data.length=2048
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base")
    config = c.base()
    config.objective = "diffusion"
    config.batch_size = 512
    config.total = c.duration(steps=1_000_000)
    config.model.size = size
    config.model.max_position_embeddings = 2048
    config.model.type_vocab_size = 0
    config.model.layer_norm_eps = 1e-5
    config.model.hidden_act = "gelu_tanh"
    config.model.attention_probs_dropout_prob = 0.0
    config.model.embedding_norm = False
    config.model.position_embedding_type = "rope"
    config.model.norm_position = "pre"
    config.model.norm_bias = False
    config.model.final_norm = True
    config.model.attention_bias = False
    config.model.classifier_transform = False
    config.model.tie_word_embeddings = False
    config.data.length = 1024
    config.data.plan = "full_sentences"
    config.data.tokenizer = "byte_bpe"
    config.data.vocab_size = 50_257
    config.optim.lr = 3e-4
    config.optim.eps = 1e-8
    config.optim.wd = 0.0
    config.optim.schedule = "constant"
    config.optim.warmup = c.duration(steps=2_500)
    if smoke:
        return c.make_smoke(config)
    config.optim.ema = 0.9999
    return config
