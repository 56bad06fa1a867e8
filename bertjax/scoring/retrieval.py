# SPDX-License-Identifier: Apache-2.0
"""How well a model's vectors find the passages that answer queries."""

from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.config import cli
from bertjax.data.corpus.sources import named_sources
from bertjax.inference import embed_texts
from bertjax.scoring.confidence import half_width
from bertjax.scoring.scorer import Scores, scores_of_sets, two_columns
from bertjax.tasks import passages, search
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.task_type import find_task_type

FLAGS = ("columns",)


def score(args: Any, path: str, flag: str) -> Scores:
    """Score each set of --text; of a model made for retrieval also its data.valid.

    Vectors are compared by their angle, or by inner products where the model was made
    for them.
    """
    model = embed_texts.open_embedder(path, flag, args.dtype, args.weights)
    named, text, key = passages.COLUMNS, args.text, "--text"
    task_type = find_task_type(model.config.objective)
    if task_type and task_type.makes_vectors:
        named = tasks.make_form(model.config).keys()
        if not text:
            text, key = model.config.data.valid, "data.valid"
    columns = dict(zip(passages.FLAGS, named.values(), strict=True))
    if args.columns is not None:
        names = two_columns(args.columns, "QUERY,POSITIVE")
        columns |= zip(passages.FLAGS, names, strict=False)
    if not text:
        raise UserError(
            "--what=retrieval needs --text=FOLDER, in BEIR's layout, or --text=TABLE"
        )
    sets: dict[str, dict[str, float]] = {}
    for name, part in named_sources(text, key).items():
        (collection,) = passages.read_collections(part, key, columns, cli.say)
        grades, texts = collection.grades, [*collection.queries, *collection.passages]
        vectors = comparable_vectors(model, texts, args.batch_size or 32)
        queries, texts = np.split(vectors, [len(collection.queries)])
        found = search.search(queries, texts, collection.own)
        sets[name] = {"queries": len(grades), "passages": len(collection.passages)}
        # Queries with the same answer resemble each other: they are one draw.
        same = np.array([min(p for p in of if of[p] > 0) for of in grades])
        for measure, each in search.measure(found, grades).items():
            sets[name][measure] = float(each.mean())
            width = half_width(each, np.ones_like(each), same)
            if width is not None:
                sets[name][f"{measure}_ci95"] = width
    return scores_of_sets(sets, args, model.meta)


def comparable_vectors(
    model: Any, texts: list[str], batch_size: int, dtype: Any = np.float32
) -> np.ndarray:
    """Return vectors [n, D] whose inner products compare texts as the model does.

    They have length 1, but of a model made for inner products. Says how many texts were
    cut.
    """
    vectors, cut = model.embed(texts, batch_size)
    vectors = vectors.astype(dtype)
    if cut:
        cli.say(f"{cut:,} texts cut at {model.how.longest} tokens")
    if not model.how.dot:
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors /= np.maximum(norms, 1e-12)
    return vectors
