# SPDX-License-Identifier: Apache-2.0
"""Score how well a model's vectors find the passages that answer queries."""

import json
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError, counted, registry
from bertjax.config import cli
from bertjax.data.corpus.sources import named_sources
from bertjax.inference import embed_texts
from bertjax.inference.cross_encoder import CrossEncoder, rerank
from bertjax.scoring.confidence import half_width, interval
from bertjax.scoring.scorer import Scores, scores_of_sets, two_columns
from bertjax.storage import atomic
from bertjax.storage.paths import expand
from bertjax.tasks import passages, search, search_measures
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.hard_negatives import choose_negatives
from bertjax.tasks.passages import Collection
from bertjax.tasks.retrieval_options import read_widths
from bertjax.tasks.task_type import find_task_type

FLAGS = ("columns", "precision", "rerank", "depth", "mine", "negatives", "margin")
DEPTH = 20  # passages that a cross-encoder reorders
NEGATIVES, MARGIN = 8, 0.05  # of mined pairs
# search by signs returns this many times more passages, to be reordered
OVERSAMPLING = 4


class Retriever(NamedTuple):
    """A model of vectors that finds passages, and optionally one that reorders them."""

    model: embed_texts.Embedder
    cross: CrossEncoder | None
    depth: int
    batch_size: int

    def index(self, collection: Collection) -> tuple[search.Index, search.Index]:
        """Return vectors of queries and of passages; report how many texts were cut."""
        queries, passages = collection.queries, collection.passages
        others = self.model.of_passages()
        if others.how == self.model.how:
            index, cut = self.model.make_index([*queries, *passages], self.batch_size)
            say_cut(self.model, cut)
            return index.split(len(queries))
        asking, cut = self.model.make_index(queries, self.batch_size)
        say_cut(self.model, cut)
        index, cut = others.make_index(passages, self.batch_size)
        say_cut(others, cut)
        return asking, index

    def rerank(self, collection: Collection, found: np.ndarray) -> np.ndarray:
        """Reorder the first passages by the cross-encoder, if there is one."""
        if self.cross is None:
            return found
        first = found[:, : self.depth]
        rows, columns = np.nonzero(first >= 0)
        pairs = np.stack([rows, first[rows, columns]], axis=1)
        scores = np.full(first.shape, -np.inf, np.float32)
        scores[rows, columns] = self.score(collection, pairs)
        return rerank(found, scores)

    def score(self, collection: Collection, pairs: np.ndarray) -> np.ndarray:
        """Score pairs of a query and a passage by the cross-encoder."""
        assert self.cross is not None
        texts = collection.queries, collection.passages
        return self.cross.score(*texts, pairs, self.batch_size)


def score(args: Any, path: str, flag: str) -> Scores:
    """Score each set of --text, or for a model made for retrieval also its data.valid.

    Vectors are compared by angle, or by inner product if the model was trained
    for that; token vectors are compared by MaxSim. --precision also scores
    smaller vectors; --rerank reorders the first --depth by a cross-encoder.
    --mine writes hard negatives.
    """
    kinds = registry.split_list(args.precision or "")
    for name in kinds:
        registry.pick("--precision", name, search.PRECISIONS)
    from bertjax.inference.device_search import place  # needs jax

    check_options(args)
    model = embed_texts.open_embedder(path, flag, args.dtype, args.weights)
    if kinds and model.how.kind != "dense":
        raise UserError(f"--precision: {flag}={path} has {model.how.kind} vectors")
    cross = CrossEncoder(args.rerank, "--rerank", args.dtype) if args.rerank else None
    collections = read_sets(args, model)
    if args.mine:
        check_mining(args.mine, collections)
    finder = Retriever(model, cross, args.depth or DEPTH, args.batch_size or 32)
    sets: dict[str, dict[str, Any]] = {}
    for name, collection in collections.items():
        queries, texts = finder.index(collection)
        deepest = max(search_measures.DEEPEST, finder.depth)
        found, scores = place(texts).search(queries, collection.own, deepest)
        if args.mine:
            mine(args, finder, collection, found, scores)
        sets[name] = {"queries": len(queries), "passages": len(texts)}
        sets[name] |= {"index_bytes": texts.nbytes}
        sets[name] |= measure(collection, finder.rerank(collection, found), True)
        vectors = queries, texts, collection
        if model.how.kind == "dense":
            widths = read_widths(model.config.task.widths)
            if widths:
                parts = {str(w): of_width(w, *vectors, model.how.dot) for w in widths}
                sets[name]["widths"] = parts
            if kinds:
                small = {kind: of_precision(kind, *vectors) for kind in kinds}
                sets[name]["precisions"] = small
    return scores_of_sets(sets, args, model.meta)


def read_sets(args: Any, model: embed_texts.Embedder) -> dict[str, Collection]:
    """Return the collections to score. Raises UserError."""
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
    sets = named_sources(text, key).items()
    read = passages.read_collections
    return {name: read(part, key, columns, cli.say)[0] for name, part in sets}


def measure(
    collection: Collection, found: np.ndarray, intervals: bool = False
) -> dict[str, float]:
    """Return the means of all measures, with their 95% intervals if they are known."""
    grades, out = collection.grades, {}
    # Queries with the same answer resemble each other, so they count as one draw.
    same = np.array([min(p for p in of if of[p] > 0) for of in grades])
    for name, each in search_measures.measure(found, grades).items():
        out[name] = float(each.mean())
        if intervals and np.ptp(each):  # otherwise the spread of queries is unknown
            out |= interval(name, half_width(each, np.ones_like(each), same))
    return out


def of_width(
    width: int,
    queries: search.Dense,
    texts: search.Dense,
    collection: Collection,
    dot: bool = False,
) -> dict[str, float]:
    """Score the first `width` numbers of vectors; dot: by inner product, not angle."""
    parts = (embed_texts.narrow(x.vectors, width, not dot) for x in (queries, texts))
    asking, index = (search.Dense(part) for part in parts)
    found, _ = index.search(asking, collection.own, search_measures.DEEPEST)
    return {"index_bytes": index.nbytes, **measure(collection, found)}


def of_precision(
    kind: str, queries: search.Dense, texts: search.Dense, collection: Collection
) -> dict[str, float]:
    """Score small vectors, and their best results reordered by the full vectors."""
    index = search.PRECISIONS[kind](texts.vectors)
    most = OVERSAMPLING * search_measures.DEEPEST
    found, _ = index.search(queries, collection.own, most)
    k = search_measures.DEEPEST
    again, _ = search.rescore(found, queries, texts.vectors, k)
    plain = measure(collection, found[:, :k])
    rescored = {f"{x}_rescored": y for x, y in measure(collection, again).items()}
    return {"index_bytes": index.nbytes, **plain, **rescored}


def check_options(args: Any) -> None:
    """Refuse options without the option they belong to. Raises UserError."""
    for name in ("negatives", "margin"):
        if getattr(args, name) is not None and not args.mine:
            raise UserError(f"--{name} needs --mine=FILE, which is not given")
    if args.depth and not args.rerank:
        raise UserError("--depth needs --rerank=MODEL, which is not given")
    if args.mine:
        atomic.check_out(args.mine, "--mine", ".jsonl")


def check_mining(path: str, sets: dict[str, Collection]) -> None:
    """Refuse to overwrite an input file, or to mix several sets. Raises UserError."""
    files = [file for one in sets.values() for file in one.files]
    atomic.check_out(path, "--mine", source=("--text", files))
    if len(sets) > 1:
        raise UserError(f"--mine={path}: --text names {len(sets)} sets: give one")


def mine(
    args: Any,
    finder: Retriever,
    collection: Collection,
    found: np.ndarray,
    scores: np.ndarray,
) -> None:
    """Write JSON lines with query, positive and negatives for data.train.

    With a cross-encoder they also have its scores.
    """
    count = NEGATIVES if args.negatives is None else args.negatives
    margin = MARGIN if args.margin is None else args.margin
    how = collection.grades, collection.passages, count, margin
    chosen = choose_negatives(found, scores, *how)
    rows = [
        (query, positive, chosen[query])
        for query, grades in enumerate(collection.grades)
        for positive in [p for p, grade in grades.items() if grade > 0]
    ]
    lines = [
        {
            "query": collection.queries[query],
            "positive": collection.passages[positive],
            "negatives": [collection.passages[p] for p in negatives],
        }
        for query, positive, negatives in rows
    ]
    if finder.cross is not None:
        pairs = [(q, p) for q, first, others in rows for p in (first, *others)]
        scores = iter(finder.score(collection, np.array(pairs)).tolist())
        for line, (_, _, others) in zip(lines, rows, strict=True):
            line["scores"] = [round(next(scores), 6) for _ in range(1 + len(others))]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path = expand(args.mine, "--mine")
    atomic.write_file(path, text, f"--mine={args.mine}")
    none = sum(not negatives for _, _, negatives in rows)
    total = sum(len(negatives) for _, _, negatives in rows)
    cli.say(
        f"{path}: {counted(len(rows), 'pair')}, {counted(total, 'negative')}; "
        f"{counted(none, 'pair')} without one"
    )


def say_cut(model: embed_texts.Embedder, cut: int) -> None:
    """Report how many texts were cut."""
    if cut:
        cli.say(f"{counted(cut, 'text')} cut at {model.how.longest} tokens")
