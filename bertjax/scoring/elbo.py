# SPDX-License-Identifier: Apache-2.0
"""Bound -ln p of documents by a model that fills masks (masked_bound.py).

A document stands between [CLS] and [SEP], which are visible and never masked. Documents
longer than a window are scored in several windows. In each window, the tokens that an
earlier one scored are visible, so that the bounds add up to a bound of the document.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bertjax.scoring import document_costs, masked_bound
from bertjax.scoring.document_costs import Cost, Text
from bertjax.scoring.scorer import Scores
from bertjax.scoring.sequence_scorers import LanguageModel, open_language_model

FLAGS = (*document_costs.FLAGS, "draws", "estimator")
DRAWS = 16  # masks per window


def score(args: Any, path: str, flag: str) -> Scores:
    """Score each set of documents of --text, or of the run's data.valid."""
    estimator = masked_bound.pick_estimator(args.estimator)
    draws = masked_bound.pick_draws(args.draws, DRAWS)
    _, lm = open_language_model(args, path, flag, "elbo", "--what")
    layout = document_costs.read_layout(args, lm, 2)
    sets = {}
    for name, texts in document_costs.read_sets(args, lm, layout):
        given = layout, draws, estimator, args.batch_size
        costs, windows, variance = bound_documents(lm, texts, *given)
        totals = document_costs.add_up("elbo", texts, costs, lm.tokenizer.unk_id)
        interval = 1.96 * math.sqrt(variance) / totals["tokens"]
        sets[name] = totals | {"windows": windows, "interval": interval}
    about = layout._asdict() | {"draws": draws, "estimator": estimator}
    del about["room"]
    return document_costs.make_scores(args, lm, about, sets)


def bound_documents(
    lm: LanguageModel,
    texts: Sequence[Text],
    layout: document_costs.Layout,
    draws: int,
    estimator: str,
    batch_size: int | None = None,
) -> tuple[list[Cost], int, float]:
    """Return (bounds of -ln p of each document in nats, number of windows, variance).

    The variance is that of the sum of all bounds, from the random draws.
    """
    bound = masked_bound.make_bounder(
        lm.cfg,
        lm.params,
        lm.tokenizer,
        draws=draws,
        estimator=estimator,
        before=lm.before,
        batch_size=batch_size,
    )
    windows = document_costs.cut_texts(texts, layout)
    found = bound([(texts[i].ids, window) for i, window in windows])
    nats = np.zeros(len(texts))
    np.add.at(nats, [i for i, _ in windows], [-one.value for one in found])
    each = zip(nats.tolist(), texts, strict=True)
    costs = [Cost(cost, len(text.ids)) for cost, text in each]
    return costs, len(windows), math.fsum(one.variance for one in found)
