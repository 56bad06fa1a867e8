# SPDX-License-Identifier: Apache-2.0
"""Write distil_golden.npz: torch's distillation losses on random logits and states.

The formulas are those of huggingface/transformers, examples/research_projects/
distillation/distiller.py (mean over the selected tokens), with torch's own loss
functions; relations of heads as in Wang et al. 2020 (arXiv 2012.15828, eqs. 3 to 5).

  python tests/testdata/make_distil_golden.py        (with torch, any version)
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn

B, L, V, D, TEMPERATURE = 3, 6, 11, 8, 2.0
HEADS, LONG = 2, {"student": 8, "teacher": 12}


def main() -> None:
    draw = np.random.default_rng(7)
    arrays = {
        name: draw.normal(size=shape).astype(np.float32)
        for name, shape in {
            "student": (B, L, V),
            "teacher": (B, L, V),
            "student_hidden": (B, L, D),
            "teacher_hidden": (B, L, D),
            "student_vectors": (B, L, LONG["student"]),
            "teacher_vectors": (B, L, LONG["teacher"]),
        }.items()
    }
    mask = np.arange(L) < np.array([6, 4, 1])[:, None]
    t = {name: torch.tensor(x, dtype=torch.float64) for name, x in arrays.items()}
    real = torch.tensor(mask)
    student = t["student"].requires_grad_()
    chosen = student[real], t["teacher"][real]
    kl = nn.KLDivLoss(reduction="batchmean")(
        nn.functional.log_softmax(chosen[0] / TEMPERATURE, dim=-1),
        nn.functional.softmax(chosen[1] / TEMPERATURE, dim=-1),
    )
    kl = kl * TEMPERATURE**2
    (kl_gradient,) = torch.autograd.grad(kl, student)
    hidden = t["student_hidden"].requires_grad_()
    ones = torch.ones(int(real.sum()), dtype=torch.float64)
    cosine = nn.CosineEmbeddingLoss(reduction="mean")(
        hidden[real], t["teacher_hidden"][real], ones
    )
    (cosine_gradient,) = torch.autograd.grad(cosine, hidden)
    relation = relations(t["student_vectors"], t["teacher_vectors"], real)
    found = {
        "kl": kl.item(),
        "kl_gradient": kl_gradient.numpy(),
        "cosine": cosine.item(),
        "cosine_gradient": cosine_gradient.numpy(),
        "relation": relation.item(),
    }
    path = Path(__file__).parent / "distil_golden.npz"
    np.savez_compressed(path, mask=mask, **arrays, **found)


def relations(student: torch.Tensor, teacher: torch.Tensor, real: torch.Tensor):
    """Return the mean over tokens and heads of KL(teacher's relation || student's)."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(real)):
        n = int(real[row].sum())
        both = []
        for x in (teacher, student):
            parts = x[row, :n].reshape(n, HEADS, -1).transpose(0, 1)
            scores = parts @ parts.transpose(1, 2) / parts.shape[-1] ** 0.5
            both.append(torch.log_softmax(scores, dim=-1))
        p, q = both
        total = total + (p.exp() * (p - q)).sum() / HEADS
    return total / real.sum()


if __name__ == "__main__":
    main()
