# SPDX-License-Identifier: Apache-2.0
"""Retrieval losses equal those of sentence-transformers, on one and eight devices."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.models import heads
from bertjax.models.config import EncoderConfig
from bertjax.models.pooling import normalize_vectors
from bertjax.objectives import colbert, ranking, retrieve, splade
from bertjax.parallel.mesh import make_mesh
from bertjax.parallel.sharding import batch_sharding, gather_rows

# As in tests/testdata/make_retrieval_golden.py.
SEED, B, S, D, V, L = 0, 8, 3, 8, 20, 6
WIDTHS, TEMPERATURE = (2, 5), 0.05
GOLDEN = Path(__file__).parents[1] / "testdata/retrieval_golden.json"


def arrays():
    draw = np.random.default_rng(SEED)
    sizes = draw.integers(2, L + 1, (B, S))
    return {
        "texts": draw.normal(size=(B, S, D)).astype(np.float32),
        "teacher": draw.normal(size=(B, S - 1)).astype(np.float32),
        "logits": draw.normal(size=(B, S, L, V)).astype(np.float32),
        "tokens": draw.normal(size=(B, S, L, D)).astype(np.float32),
        "mask": (np.arange(L) < sizes[..., None]).astype(np.int32),
    }


def losses(x):
    """Compute our losses; all passages are different."""
    numbers = jnp.arange(B * (S - 1)).reshape(B, S - 1)
    batch = {
        "input_ids": jnp.zeros((B, 1), jnp.int32),
        "passage_numbers": numbers,
        "relevant_numbers": numbers[:, :1],
        "teacher_scores": x["teacher"],
        "teacher_weights": jnp.ones((B, S - 1)),
    }
    out = {}
    unit = normalize_vectors(x["texts"])
    each = [unit, *(normalize_vectors(unit[..., :n]) for n in WIDTHS)]
    scores = [retrieve.product_scores(t, TEMPERATURE) for t in each]
    parts = [ranking.contrast(s, batch)[0] for s in scores]
    out["ranking"] = parts[0]
    total = sum(part.value for part in parts)
    out["matryoshka"] = parts[0]._replace(value=total)
    out["margin"] = ranking.margin_error(retrieve.product_scores(x["texts"], 1), batch)

    # The embeddings are the identity, so that hidden states are the logits to pool.
    shape = dict(hidden_size=V, num_hidden_layers=1, num_attention_heads=1)
    bare = dict(classifier_transform=False, decoder_bias=False, vocab_size=V)
    cfg = EncoderConfig(intermediate_size=V, **shape, **bare)
    hidden = x["logits"].reshape(B, S * L, V)
    slot = jnp.repeat(jnp.arange(S), L)
    real = x["mask"].reshape(B, 1, S * L) > 0
    members = real & (slot == jnp.arange(S)[:, None])
    texts = heads.term_weights({}, jnp.eye(V), cfg, hidden, members)
    out["splade"] = ranking.contrast(retrieve.product_scores(texts, 1), batch)[0]
    ones = jnp.ones(B)
    out["query_flops"] = splade.flops_penalty(texts[:, 0], ones)
    flat = texts[:, 1:].reshape(-1, V), jnp.ones(B * (S - 1))
    out["passage_flops"] = splade.flops_penalty(*flat)

    tokens = normalize_vectors(x["tokens"]).reshape(B, S * L, D)
    of_query = tokens[:, :L], x["mask"][:, 0] > 0
    everyone = gather_rows(tokens), gather_rows(members[:, 1:])
    scores = colbert.max_sim(*of_query, *everyone)
    out["colbert"] = ranking.contrast(scores, batch)[0]
    out["colbert_margin"] = ranking.margin_error(scores, batch)
    return {name: part.value / part.weight for name, part in out.items()}


@pytest.mark.parametrize("devices", [1, 8])
def test_as_sentence_transformers(devices):
    golden = json.loads(GOLDEN.read_text("utf-8"))
    x = {name: jnp.asarray(value) for name, value in arrays().items()}
    if devices == 1:
        found = jax.jit(losses)(x)
    else:
        mesh = make_mesh()
        with jax.set_mesh(mesh):
            found = jax.jit(losses)(jax.device_put(x, batch_sharding(mesh)))
    assert found.keys() == golden.keys()
    for name, value in golden.items():
        assert float(found[name]) == pytest.approx(value, rel=1e-5), name
