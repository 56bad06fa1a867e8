# SPDX-License-Identifier: Apache-2.0
"""CausaLM: a masked LM goes on while it unlearns a concept and keeps a control.

Feder et al. 2021 (arXiv 2005.13407), section 3, and amirfeder/CausaLM: 15% of the
tokens, words of the concept and as many others, 80/10/10; a head tells the two apart
through a gradient reversal, another learns the control; losses are added; batch 8, 5
epochs. Give init_from (a BERT), data.concept and, for the control, data.control, or
leave `+control` out of objective. ARG: a size, or smoke, whose words are made up. Ours:
batch 32, lr 3e-5, warm-up 10%, and the reversal's schedule (there it is 1 throughout,
concept:gamma=0).
"""

from bertjax import config as c


def get_config(arg: str | None = None):
    size, smoke = c.read_arg(arg, size="base")
    config = c.base()
    config.objective = "mlm+concept+control"
    config.batch_size = 32
    config.total = c.duration(epochs=5)
    config.model.size = size
    config.data.length = 128
    config.data.plan = "document"
    config.data.masking = "bert"
    config.data.mask_unit = "concept"
    config.optim.lr = 3e-5
    config.optim.warmup = c.duration(percent=10)
    if smoke:
        config = c.make_smoke(config)
        config.data.concept = "words:the,a,an"
        config.data.control = "words:of,in,to,for"
    return config
