# SPDX-License-Identifier: Apache-2.0
"""Write rag_golden.npz: marginals of random logits by transformers 5's modeling_rag.

    pip install torch transformers; python tests/testdata/make_rag_golden.py

There are three targets of up to six tokens, four documents and eleven pieces. The
targets of transformers begin with a token that is not predicted, and end with padding,
piece 0.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers.models.rag import modeling_rag

B, K, T, V, PAD, FIRST = 3, 4, 6, 11, 0, 2
draw = np.random.default_rng(0)
logits = draw.normal(size=(B, K, T, V)).astype(np.float32) * 3
scores = draw.normal(size=(B, K)).astype(np.float32) * 2
lengths = np.array([6, 3, 1])
ids = draw.integers(3, V, (B, T)) * (np.arange(T) < lengths[:, None])

generator = SimpleNamespace(pad_token_id=PAD, bos_token_id=None)
config = SimpleNamespace(n_docs=K, bos_token_id=None, generator=generator)
target = torch.tensor(np.concatenate([np.full((B, 1), FIRST), ids], axis=1))
# After the last token there is one more prediction, of padding, which is masked.
behind = np.concatenate([logits, np.zeros((B, K, 1, V), np.float32)], axis=2)
flat = torch.tensor(behind.reshape(B * K, T + 1, V))
golden = {"logits": logits, "scores": scores, "ids": ids}
for name in ("Sequence", "Token"):
    kind = getattr(modeling_rag, f"Rag{name}ForGeneration")
    own = kind.__new__(kind)
    torch.nn.Module.__init__(own)
    own.config = config
    nats = own.get_nll(flat, torch.tensor(scores), target)
    golden[name.lower()] = nats.numpy()
golden["marginal"] = own.marginalize(
    torch.tensor(logits.reshape(B * K, T, V)), torch.tensor(scores)
).numpy()
file = Path(__file__).with_name("rag_golden.npz")
np.savez_compressed(file, **golden)
print({k: v for k, v in golden.items() if v.ndim == 1})
