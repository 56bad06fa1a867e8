# SPDX-License-Identifier: Apache-2.0
"""Synthetic vocabularies, text and rows, without files or a library's tokenizer."""

from types import SimpleNamespace

import numpy as np


def fake_tokenizer(size, word_starts=None, **own):
    """Make a tokenizer of `size` pieces with the attributes that masking and host
    halves read.

    [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4; each piece is a word unless
    word_starts says otherwise; own: further attributes, and those to replace.
    """
    usual = dict(pad_id=0, unk_id=1, cls_id=2, sep_id=3, mask_id=4, has_mask=True)
    usual |= dict(special_ids=np.arange(5), sentence_ends=np.zeros(size, bool))
    usual |= dict(replacement_ids=np.arange(5, size, dtype=np.int32))
    starts = np.ones(size, bool) if word_starts is None else word_starts
    return SimpleNamespace(vocab_size=size, word_starts=starts, **usual | own)


def fake_store(sentences, documents, seed=0, *, size):
    """Make a token store over `size` pieces, without a library's random generator."""
    number = np.arange(sentences, dtype=np.int64) + seed
    offsets = np.cumsum(np.append(0, number * 7919 % 23 + 2))
    tokens = np.arange(offsets[-1], dtype=np.int64) * 48271 % 2147483647 % (size - 5)
    starts = np.arange(documents) * sentences // documents
    return SimpleNamespace(
        tokens=(tokens + 5).astype(np.uint16),
        sentences=offsets,
        documents=np.append(starts, sentences),
    )


def random_rows(b, length, seed=0, unknown=0.05, *, size):
    """Make b rows of random text of 3 to `length` tokens.

    Returns their ids and the attention mask, i32 [b, length]; unknown: share of [UNK].
    """
    rng = np.random.default_rng(seed)
    ids = rng.integers(5, size, (b, length)).astype(np.int32)
    ids[rng.random(ids.shape) < unknown] = 1
    used = rng.integers(3, length + 1, b)
    ids[:, 0], ids[np.arange(b), used - 1] = 2, 3
    real = (np.arange(length) < used[:, None]).astype(np.int32)
    return ids * real, real
