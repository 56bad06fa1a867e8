# SPDX-License-Identifier: Apache-2.0
"""Stores in which token i is 10 + i, and the rows of their plans."""

from types import SimpleNamespace

import numpy as np

from bertjax.data import counter_rng

PAD, CLS, SEP = 0, 1, 2
SPECIALS = SimpleNamespace(pad_id=PAD, cls_id=CLS, sep_id=SEP)


def store_of(documents, **more):
    """Make a store of documents, lists of sentence lengths; more: other attributes."""
    sentences = np.cumsum([0] + [n for d in documents for n in d])
    return SimpleNamespace(
        tokens=np.arange(10, 10 + sentences[-1]).astype(np.uint32),
        sentences=sentences,
        documents=np.cumsum([0] + [len(d) for d in documents]),
        **more,
    )


def rows_of(plan, ids=None, epoch=0):
    """Return some of the rows of a plan, or all."""
    ids = np.arange(plan.n) if ids is None else ids
    return plan.gather(ids, counter_rng.fold(3, epoch, ids), SPECIALS)
