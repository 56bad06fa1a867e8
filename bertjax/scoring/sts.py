# SPDX-License-Identifier: Apache-2.0
"""Score semantic textual similarity: whether vectors agree with human judgments.

As in sentence-transformers' EmbeddingSimilarityEvaluator: Pearson's and Spearman's
correlation between the cosines of two texts' vectors and human scores.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bertjax import UserError, counted
from bertjax.config import cli
from bertjax.data.corpus.sources import named_sources
from bertjax.inference import embed_texts
from bertjax.scoring.confidence import correlation_half_width, interval
from bertjax.scoring.retrieval import say_cut
from bertjax.scoring.scorer import Scores, scores_of_sets, two_columns
from bertjax.tasks import metrics
from bertjax.tasks.tables import read_rows
from bertjax.tasks.text_rows import scores_of, text_of

FLAGS = ("columns", "label")
# Flag that names a column, as in messages -> the default column.
COLUMNS = {
    "--columns: TEXT": "sentence1",
    "--columns: TEXT_PAIR": "sentence2",
    "--label": "score",
}


def score(args: Any, path: str, flag: str) -> Scores:
    """Score each set of --text, a table of pairs."""
    if not args.text:
        raise UserError("--what=sts needs --text=FILE, a table of pairs and scores")
    columns = dict(COLUMNS)
    if args.columns is not None:
        names = two_columns(
            args.columns, "TEXT,TEXT_PAIR, and name the third by --label=SCORE"
        )
        columns |= zip(columns, names, strict=False)
    if args.label is not None:
        columns["--label"] = args.label
    named = named_sources(args.text, "--text").items()
    tables = {name: read_pairs(part, "--text", columns) for name, part in named}
    model = embed_texts.open_embedder(path, flag, args.dtype, args.weights)
    sets = {
        name: correlations(model, *pairs, args.batch_size or 32)
        for name, pairs in tables.items()
    }
    return scores_of_sets(sets, args, model.meta)


def read_pairs(
    value: str, key: str, columns: Mapping[str, str]
) -> tuple[list[str], np.ndarray]:
    """Read the tables of a flag; return (texts [2 n], scores f64 [n]).

    The first texts of all pairs come before the second ones.

    columns: as COLUMNS. Reports how many texts are empty. Raises UserError that names
    file and line for what is not such a table, and if all scores are the same.
    """
    rows = read_rows(value, key, columns, cli.say)
    one, other, label = columns.values()
    texts = [text_of(row, name) for name in (one, other) for row in rows]
    scores = scores_of(rows, label).astype(np.float64)
    if len({*scores.tolist()}) < 2:
        raise UserError(
            f"{key}={value}: every row has the {label} {scores[0]:g}: there is nothing "
            "to correlate with"
        )
    if empty := sum(not text.strip() for text in texts):
        cli.say(f"{value}: {counted(empty, 'empty text')}, kept")
    return texts, scores


def correlations(
    model: Any, texts: list[str], scores: np.ndarray, batch_size: int
) -> dict[str, float]:
    """Return the correlations, their intervals (*_ci95), and the number of pairs.

    model: an Embedder; texts, scores: from `read_pairs`. Vectors are compared by
    cosine, or by inner product if the model was trained for it; the names of the
    correlations end in the comparison used. Reports how many texts were cut.
    """
    vectors, cut = model.embed(texts, batch_size)
    say_cut(model, cut)
    vectors = vectors.astype(np.float64)
    if not model.how.dot:
        vectors = embed_texts.normalized(vectors)
    similarity = np.einsum("nd,nd->n", *np.split(vectors, 2))
    how = "dot" if model.how.dot else "cosine"
    values: dict[str, float] = {"pairs": len(similarity)}
    for name in ("spearman", "pearson"):
        values[f"{name}_{how}"] = metrics.METRICS[name](similarity, scores)
        ranked = name == "spearman"
        width = correlation_half_width(similarity, scores, ranked)
        values |= interval(f"{name}_{how}", width)
    return values
