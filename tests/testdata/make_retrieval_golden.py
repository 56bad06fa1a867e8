# SPDX-License-Identifier: Apache-2.0
"""Write retrieval_golden.json: sentence-transformers' losses on random numbers.

python tests/testdata/make_retrieval_golden.py       (sentence-transformers 6.2, torch)

It needs no model: the losses get vectors, and SpladePooling gets logits.
"""

import json
from pathlib import Path

import numpy as np
import torch
from sentence_transformers.multi_vector_encoder.scoring import (
    colbert_scores,
    colbert_scores_pairwise,
)
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.losses.matryoshka import shrink
from sentence_transformers.sparse_encoder.losses import (
    FlopsLoss,
    SparseMultipleNegativesRankingLoss,
)
from sentence_transformers.sparse_encoder.modules import SpladePooling
from sentence_transformers.util import dot_score, pairwise_dot_score

SEED, B, S, D, V, L = 0, 8, 3, 8, 20, 6  # rows, texts per row, sizes, tokens
WIDTHS, TEMPERATURE = (2, 5), 0.05
OUT = Path(__file__).with_name("retrieval_golden.json")


def arrays():
    """Draw the same numbers as tests/objectives/test_retrieval_golden.py."""
    draw = np.random.default_rng(SEED)
    sizes = draw.integers(2, L + 1, (B, S))
    return {
        "texts": draw.normal(size=(B, S, D)).astype(np.float32),
        "teacher": draw.normal(size=(B, S - 1)).astype(np.float32),
        "logits": draw.normal(size=(B, S, L, V)).astype(np.float32),
        "tokens": draw.normal(size=(B, S, L, D)).astype(np.float32),
        "mask": (np.arange(L) < sizes[..., None]).astype(np.int32),
    }


def main():
    x = {name: torch.tensor(value) for name, value in arrays().items()}
    columns = [*x["texts"].unbind(1)]
    ranking = losses.MultipleNegativesRankingLoss(None, scale=1 / TEMPERATURE)
    found = {"ranking": ranking.compute_loss_from_embeddings(columns, None)}
    found["matryoshka"] = sum(
        ranking.compute_loss_from_embeddings([shrink(c, n) for c in columns], None)
        for n in (D, *WIDTHS)
    )
    margin = losses.MarginMSELoss(None, similarity_fct=pairwise_dot_score)
    found["margin"] = margin.compute_loss_from_embeddings(columns, x["teacher"])

    mask = x["mask"].reshape(B * S, L)
    pooling = SpladePooling()
    features = {"token_embeddings": x["logits"].reshape(B * S, L, V).clone()}
    weights = pooling({**features, "attention_mask": mask})["sentence_embedding"]
    texts = weights.reshape(B, S, V)
    columns = [*texts.unbind(1)]
    sparse = SparseMultipleNegativesRankingLoss(
        None, scale=1.0, similarity_fct=dot_score
    )
    found["splade"] = sparse.compute_loss_from_embeddings(columns, None)
    penalty = FlopsLoss(None).compute_loss_from_embeddings
    found["query_flops"] = penalty(columns[0])
    found["passage_flops"] = penalty(torch.cat(columns[1:]))

    tokens = torch.nn.functional.normalize(x["tokens"], dim=-1)
    masks = x["mask"].bool()
    of = tokens[:, 0], tokens[:, 1:], masks[:, 0], masks[:, 1:]
    scores = colbert_scores(*of)
    right = torch.arange(B) * (S - 1)
    found["colbert"] = torch.nn.functional.cross_entropy(scores, right)
    pairs = [
        colbert_scores_pairwise(tokens[:, 0], tokens[:, k], masks[:, 0], masks[:, k])
        for k in (1, 2)
    ]
    labels = x["teacher"][:, 0] - x["teacher"][:, 1]
    found["colbert_margin"] = torch.nn.functional.mse_loss(pairs[0] - pairs[1], labels)
    values = {name: float(value) for name, value in found.items()}
    OUT.write_text(json.dumps(values, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
