# SPDX-License-Identifier: Apache-2.0
"""Write ranking_golden.npz: filtered ranks of scores with ties, by pykeen 1.11.1.

    pip install pykeen; python tests/testdata/make_ranking_golden.py

The graph has 30 entities and 3 relations, drawn at random; scores range from -2 to 2 in
steps of a half, so that many are equal. pykeen's RankBasedEvaluator gets filtered
scores, as in its `evaluate`: every known answer except the right one is NaN.
"""

from pathlib import Path

import numpy as np
import torch
from pykeen.evaluation import RankBasedEvaluator

draw = np.random.default_rng(0)
triples = np.unique(draw.integers(0, [30, 3, 30], (160, 3)), axis=0)
known = {tuple(t) for t in triples}
held_out = triples[draw.permutation(len(triples))[:40]]
golden = {"triples": triples, "held_out": held_out}
evaluator = RankBasedEvaluator()
for side, target in ((2, "tail"), (0, "head")):
    scores = np.round(draw.normal(size=(40, 30)) * 2).clip(-4, 4).astype(np.float32) / 2
    golden[f"{target}_scores"] = scores
    filtered = scores.copy()
    for row, triple in enumerate(held_out):
        for entity in range(30):
            other = triple.copy()
            other[side] = entity
            if tuple(other) in known and entity != triple[side]:
                filtered[row, entity] = np.nan
    right = scores[np.arange(40), held_out[:, side]][:, None]
    evaluator.process_scores_(
        torch.from_numpy(held_out),
        target,
        torch.from_numpy(filtered),
        true_scores=torch.from_numpy(right),
    )
result = evaluator.finalize()
names = {"mrr": "inverse_harmonic_mean_rank", "mean_rank": "arithmetic_mean_rank"}
names |= {f"hits@{k}": f"hits_at_{k}" for k in (1, 3, 10)}
for name, theirs in names.items():
    golden[name] = result.get_metric(f"both.realistic.{theirs}")
for kind in ("optimistic", "pessimistic"):
    golden[f"mrr_{kind}"] = result.get_metric(f"both.{kind}.{names['mrr']}")
for side in ("head", "tail"):
    golden[f"{side}_mrr"] = result.get_metric(f"{side}.realistic.{names['mrr']}")
file = Path(__file__).with_name("ranking_golden.npz")
np.savez_compressed(file, **golden)
print({k: v for k, v in golden.items() if np.ndim(v) == 0})
