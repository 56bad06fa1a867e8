# SPDX-License-Identifier: Apache-2.0
"""CausaLM: a pretrained masked LM unlearns a concept and keeps a control concept.

Feder et al. 2021 (arXiv 2005.13407), section 3, and amirfeder/CausaLM: of the tokens
15% are masked, words of the concept and as many others, 80/10/10. One head tells the
two kinds apart through a gradient reversal, another learns the control; the losses are
added; batch 8, 5 epochs. Set init_from (a BERT), data.concept and, for the control,
data.control; without a control, leave `+control` out of objective. ARG: a size, or
smoke, which has made-up concept words.

Differences: batch 32, lr 3e-5, warm-up 10%, and the schedule of the reversal (there it
is 1 throughout: concept:gamma=0).
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
