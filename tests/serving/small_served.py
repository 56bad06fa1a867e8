# SPDX-License-Identifier: Apache-2.0
"""Small models with random parameters in the form of opened models."""

import jax
import numpy as np

from bertjax.assembly.models import LoadedModel
from bertjax.config import schema
from bertjax.data.tokenizers.tokenizer import load_tokenizer
from bertjax.objectives.base import TokenIds
from bertjax.objectives.make_objective import make_objective

SIZES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
)
LONGEST = 64
LABELS = ("left", "right", "none")
FAMILIES = {
    "bert": {},
    "roberta": dict(max_position_embeddings=LONGEST + 2),
    "albert": dict(embedding_size=16, num_hidden_groups=1),
    "electra": dict(embedding_size=16),
    "distilbert": {},
    "modernbert": dict(local_attention=16, global_attn_every_n_layers=2),
}
TASKS = {
    "text-classification": f"classify:classes={len(LABELS)}",
    "token-classification": f"tag:classes={len(LABELS)}",
    "question-answering": "span",
    "a score": "regress",
}


class SmallModel(LoadedModel):
    """A loaded model whose checkpoint is the tree of its parameters."""

    def read_params(self, head="", weights=""):
        return self.checkpoint


def small_model(vocabulary, family="bert", objective="mlm", meta=None, **options):
    """Make a model with parameters far from their initial values."""
    tokenizer = load_tokenizer(vocabulary)
    config = schema.base()
    config.objective = objective
    config.data.length = LONGEST
    sizes = {**SIZES, "max_position_embeddings": LONGEST, **FAMILIES.get(family, {})}
    config.model.update({"family": family, "size": "", **sizes, **options})
    model = SmallModel(config, tokenizer, None, meta or {})
    whole, _ = make_objective(objective, model.cfg, TokenIds.of(tokenizer))
    draws = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: np.asarray(x + 0.1 * draws.normal(size=x.shape), np.float32),
        whole.init(jax.random.key(0)),
    )
    return model._replace(checkpoint=params)


def finetuned(vocabulary, family="bert", task="text-classification", **options):
    """Make a model finetuned for a task, given by its name in Hugging Face."""
    objective = TASKS[task]
    labels = [] if objective in ("span", "regress") else [*LABELS]
    name = objective.partition(":")[0]
    model = small_model(vocabulary, family, objective, **options)
    model.config.objective = name
    model.config.task.text = "text"
    return model._replace(meta={"task": {"labels": labels}})
