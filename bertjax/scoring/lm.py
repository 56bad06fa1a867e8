# SPDX-License-Identifier: Apache-2.0
"""Score documents by causal log-likelihood: each token given those before it.

A document is laid out as in training, after the begin token. Documents longer than a
window are scored in several windows, each token once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bertjax import registry
from bertjax.scoring import document_costs
from bertjax.scoring.document_costs import Cost, Text
from bertjax.scoring.scorer import Scores
from bertjax.scoring.sequence_scorers import LanguageModel, open_language_model
from bertjax.scoring.token_rows import Row, causal_row, make_row_scorer

FLAGS = (*document_costs.FLAGS, "begin")
BEGIN = dict.fromkeys(("cls", "none"))


def score(args: Any, path: str, flag: str) -> Scores:
    """Score each set of documents of --text, or of the run's data.valid."""
    if args.begin is not None:
        registry.pick("--begin", args.begin, BEGIN)
    _, lm = open_language_model(args, path, flag, "lm", "--what")
    begin = find_begin(lm.tokenizer, args.begin)
    # Without a begin token, the first token of a window is not scored. If each row of
    # the training ended with [SEP], the last slot of a window has no token: the model
    # has learned that it never contains text.
    alone = begin is None
    layout = document_costs.read_layout(args, lm, 1 - alone + lm.closed, alone)
    sets = {}
    for name, texts in document_costs.read_sets(args, lm, layout):
        costs, windows = score_documents(lm, texts, layout, begin, args.batch_size)
        totals = document_costs.add_up("lm", texts, costs, lm.tokenizer.unk_id)
        sets[name] = totals | {"windows": windows}
    about = layout._asdict() | {"begin": "none" if begin is None else "cls"}
    del about["room"]
    return document_costs.make_scores(args, lm, about, sets)


def find_begin(tokenizer: Any, begin: str | None) -> int | None:
    """Return the token that windows begin with, or None.

    The default is [CLS], but None if that also ends texts (GPT-2's <|endoftext|>). A
    text then begins as in transformers, and its first token is not scored.
    """
    if begin is None:
        begin = "none" if tokenizer.cls_id == tokenizer.sep_id else "cls"
    return tokenizer.cls_id if begin == "cls" else None


def score_documents(
    lm: LanguageModel,
    texts: Sequence[Text],
    layout: document_costs.Layout,
    begin: int | None,
    batch_size: int | None = None,
) -> tuple[list[Cost], int]:
    """Return the cost of each document (-ln p in nats) and the number of windows.

    begin: the token that windows begin with, or None.
    """
    (cfg, steps), pad = lm.causal, lm.tokenizer.pad_id
    run = make_row_scorer(cfg, lm.params, pad, steps=steps, batch_size=batch_size)
    # Without a begin token, no token predicts the first one.
    alone = begin is None
    windows = [
        (i, window)
        for i, window in document_costs.cut_texts(texts, layout)
        if window.end - window.start > alone
    ]

    def make(i: int) -> Row:
        which, window = windows[i]
        return causal_row(texts[which].ids, window, begin)

    owners = np.array([which for which, _ in windows], np.int64)
    sizes = np.array([w.end - w.start - alone for _, w in windows], np.int64)
    first = [max(w.first, w.start + alone) for _, w in windows]
    counts = np.array([w.end for _, w in windows], np.int64) - np.array(first, np.int64)
    nats = np.bincount(owners, -run(sizes, counts, make), len(texts))
    tokens = np.bincount(owners, counts, len(texts)).astype(int)
    costs = [Cost(*each) for each in zip(nats.tolist(), tokens.tolist(), strict=True)]
    return costs, len(windows)
