# SPDX-License-Identifier: Apache-2.0
"""Embeddings of texts, with the pooling and options that the model is intended for."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError, registry
from bertjax.assembly import models, resolve
from bertjax.data.progress import Progress
from bertjax.interop import sentence_transformers
from bertjax.interop.sentence_transformers import CROSS
from bertjax.tasks import search
from bertjax.tasks.task_type import POOLINGS, find_task_type

__all__ = ["Embedder", "embed_rows", "make_embedder", "open_embedder", "tokenize"]

BLOCK = 1000  # lines that are tokenized at a time
ACTIVE = 256  # weights kept per text, if the model does not say how many
SPARSE = ("weights", "terms")  # what forward.term_weights returns
Encode = Callable[[dict[str, np.ndarray]], Any]


class Embedder(NamedTuple):
    """A model that embeds texts; how: its options (Sentences), all of them settled."""

    encode: Encode
    tokenizer: Any
    how: sentence_transformers.Sentences
    config: Any
    meta: dict[str, Any]
    digest: str = ""  # the hash of the parameters (`digest_of`)

    def embed(self, lines: list[str], batch_size: int = 32) -> tuple[np.ndarray, int]:
        """Return the vectors of texts, f32 [n, D], and how many texts were cut.

        Raises UserError if the model's vectors are not dense (`make_index` supports
        other kinds), and if a number is not finite.
        """
        if self.how.kind != "dense":
            raise UserError(
                f"the model's vectors are {self.how.kind}, not a list of numbers a text"
            )
        rows, cut = self.tokenize(lines)
        pad_id, longest = self.tokenizer.pad_id, self.how.longest
        vectors = embed_rows(self.encode, rows, pad_id, batch_size, longest)
        if (lost := np.flatnonzero(~np.isfinite(vectors).all(axis=-1))).size:
            raise UserError(
                f"the model's vector of {lines[lost[0]][:40]!r} is not finite: its "
                "weights are damaged, or its numbers too large for this dtype"
            )
        return vectors, cut

    def of_passages(self) -> "Embedder":
        """Return the embedder for passages, which may be longer than other texts."""
        how = sentence_transformers.of_passages(self.how, self.config, self.meta)
        return self._replace(how=how)

    def tokenize(self, lines: list[str]) -> tuple[list[np.ndarray], int]:
        """Return texts as ids, and how many were cut."""
        texts = [self.how.prompt + line for line in lines]
        return tokenize(self.tokenizer, texts, self.how.longest)

    def make_index(
        self, lines: list[str], batch_size: int = 32
    ) -> tuple[search.Index, int]:
        """Return an index of the vectors of texts, and how many texts were cut.

        Vectors may be of any kind; inner products in the index compare them as the
        model does.
        """
        if self.how.kind == "dense":
            vectors, cut = self.embed(lines, batch_size)
            if not self.how.dot:
                vectors = normalized(vectors)
            return search.Dense(vectors), cut
        rows, cut = self.tokenize(lines)
        how = self.encode, rows, self.tokenizer.pad_id, batch_size, self.how.longest
        outputs: list[Any] = [None] * len(rows)
        for which, found in encode_rows(*how):
            for i, own in enumerate(which):
                # Copy, because a view would keep the whole batch in memory.
                if self.how.kind == "multi_vector":
                    outputs[own] = found[i, : len(rows[own])].copy()
                else:
                    outputs[own] = {name: x[i].copy() for name, x in found.items()}
        if self.how.kind == "multi_vector":
            return search.MultiVectors.of(outputs), cut
        weights, terms = (np.stack([x[k] for x in outputs]) for k in SPARSE)
        pieces = self.tokenizer.vocab_size  # the model may have more rows, as padding
        width = resolve.encoder_config(self.config, pieces).vocab_size
        return search.Sparse.of_top(weights, terms, width), cut


def narrow(vectors: np.ndarray, width: int | None, normalize: bool) -> np.ndarray:
    """Truncate vectors to `width`; normalize: scale them to length 1 again."""
    if width is None:
        return vectors
    part = np.ascontiguousarray(vectors[:, :width])
    return normalized(part) if normalize else part


def normalized(vectors: np.ndarray) -> np.ndarray:
    """Scale vectors [n, D] to length 1; zeros stay zeros."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(norms, 1e-12)


def open_embedder(
    path: str, flag: str, dtype: str = "float32", weights: str = "", *options: Any
) -> Embedder:
    """Open a model as an Embedder; options: make_embedder's. Raises UserError."""
    model = models.open_model(path, flag)
    model.config.dtype = dtype
    return make_embedder(model, f"{flag}={path}", weights, *options)


def make_embedder(
    model: models.LoadedModel,
    where: str,
    weights: str = "",
    pooling: str | None = None,
    normalize: bool | None = None,
    max_length: int | None = None,
) -> Embedder:
    """Return the Embedder of a loaded model.

    where: its name in messages. None for an option selects what the model is intended
    for. Raises UserError as `settle_sentences` does.
    """
    how = settle_sentences(model, where, pooling, normalize, max_length)
    if how.kind == "sparse":
        params = model.read_params("mlm", weights)
        encode = _make_encode(params, model.cfg, "term_weights", how.active or ACTIVE)
    elif how.kind == "multi_vector":
        params = model.read_params(weights=weights)
        encode = _make_encode(params, model.cfg, "token_vectors")
    else:
        params = model.read_params(weights=weights)
        encode = make_encoder(model.cfg, params, how.pooling, how.normalize)
    facts = how, model.config, model.meta, digest_of(params)
    return Embedder(encode, model.tokenizer, *facts)


def digest_of(params: Any) -> str:
    """Return a hash that identifies parameters: of names, shapes and some numbers."""
    digest = hashlib.sha256()

    def add(name: str, tree: Any) -> None:
        if isinstance(tree, Mapping):
            for key in sorted(tree):
                add(f"{name}/{key}", tree[key])
            return
        flat = np.asarray(tree).reshape(-1)
        digest.update(f"{name}{np.shape(tree)}".encode())
        digest.update(np.ascontiguousarray(flat[:: max(1, len(flat) // 64)]).tobytes())

    add("", params)
    return digest.hexdigest()


def settle_sentences(
    model: models.LoadedModel,
    where: str,
    pooling: str | None = None,
    normalize: bool | None = None,
    max_length: int | None = None,
) -> sentence_transformers.Sentences:
    """Return the options with which a loaded model embeds texts, all of them settled.

    The arguments are those of `make_embedder`. Raises UserError for options and models
    that are not supported.
    """
    tokenizer, cfg = model.tokenizer, model.cfg
    task_type = find_task_type(model.config.objective)
    if task_type and task_type.make_tokenizer:
        raise UserError(
            f"{where} reads triples of a graph: its vocabulary is the graph's, and "
            "texts are unknown to it"
        )
    intended = sentence_transformers.sentence_options(model.checkpoint, model.meta)
    if intended.kind == CROSS:
        raise UserError(
            f"{where} is a cross-encoder, which scores two texts read together and has "
            "no vector of one: bertjax.evaluate --what=retrieval --rerank orders by it "
            "what a model of vectors finds"
        )
    given = {"--pooling": pooling, "--normalize": normalize}
    for name in [x for x in given if given[x] is not None and intended.kind != "dense"]:
        raise UserError(
            f"{name} has no effect with {where}: its vectors are no averages"
        )
    if (
        pooling is None
        and intended.kind == "dense"
        and intended.pooling not in POOLINGS
    ):
        raise UserError(
            f"{where}: its vectors are made by {intended.pooling}, which "
            "is not known here; --pooling=mean and --pooling=cls give others"
        )
    if intended.lower and not tokenizer.lower_case:
        raise UserError(
            f"{where}: {sentence_transformers.LIMITS} has do_lower_case=true, "
            "which is not known here where the tokenizer keeps capitals"
        )
    pooling = intended.pooling if pooling is None else pooling
    if intended.kind == "dense":
        registry.pick("--pooling", pooling, POOLINGS)
    if cfg.is_decoder and pooling == "cls":
        raise UserError(
            f"{where}: --pooling=cls: the first token of a decoder sees itself alone; "
            "give --pooling=last or --pooling=mean"
        )
    if max_length is not None and max_length > cfg.max_length:
        raise UserError(
            f"--max_length={max_length}: the model has {cfg.max_length} positions"
        )
    longest = min(max_length or intended.longest or cfg.max_length, cfg.max_length)
    if longest < 2:
        raise UserError(f"{where}: texts of {longest} tokens are too short")
    return dataclasses.replace(
        intended,
        pooling=pooling,
        normalize=intended.normalize if normalize is None else normalize,
        longest=longest,
    )


def tokenize(
    tokenizer: Any, lines: list[str], longest: int
) -> tuple[list[np.ndarray], int]:
    """Return [CLS] line [SEP] as ids, i32 [length] each, and how many were cut."""
    marks = [tokenizer.pieces[i] for i in tokenizer.roles.values()]
    rows, cut = [], 0
    for begin in range(0, len(lines), BLOCK):
        block = lines[begin : begin + BLOCK]
        for line, ids in zip(block, tokenizer.encode_batch(block), strict=True):
            if any(mark in line for mark in marks):
                ids = tokenizer.encode_with_masks(line)
            cut += len(ids) > longest - 2
            ids = [tokenizer.cls_id, *ids[: longest - 2], tokenizer.sep_id]
            rows.append(np.array(ids, np.int32))
    return rows, cut


def make_encoder(cfg: Any, params: Any, pooling: str, normalize: bool) -> Encode:
    """Return encode(batch) -> vectors, f32 [B, D]; batch: from forward.pad_batches.

    The mean is over the real tokens, including [CLS] and [SEP]; "cls" is the first
    token's last hidden state, without a pooler (sentence-transformers' Pooling).
    """
    own = {"encoder": params["encoder"]}
    return _make_encode(own, cfg, "pooled_vectors", pooling, normalize)


def _make_encode(params: Any, cfg: Any, readout: str, *options: Any) -> Encode:
    from bertjax.inference import forward  # this imports jax

    placed = forward.place_params(params, cfg)
    run = forward.make_forward(cfg, getattr(forward, readout), *options)
    return functools.partial(run, placed)


def embed_rows(
    encode: Encode, rows: list[np.ndarray], pad_id: int, batch_size: int, longest: int
) -> np.ndarray:
    """Return the vectors of rows of ids, in order: f32 [n, D]."""
    vectors = np.empty((0, 0), np.float32)
    for which, found in encode_rows(encode, rows, pad_id, batch_size, longest):
        if not len(vectors):
            vectors = np.empty((len(rows), found.shape[1]), np.float32)
        vectors[which] = found
    return vectors


def encode_rows(
    encode: Encode, rows: list[np.ndarray], pad_id: int, batch_size: int, longest: int
) -> Iterator[tuple[np.ndarray, Any]]:
    """Yield (indices of rows, `encode` of these rows), longest rows first."""
    from bertjax.inference import forward

    sizes = np.array([len(row) for row in rows])
    work = forward.count_work(forward.plan_batches(sizes, batch_size, longest)[1])
    with Progress("embed", total=len(rows), unit="lines", work=work) as progress:
        batches = forward.pad_batches(rows, pad_id, batch_size, longest)
        yield from forward.run_batches(batches, encode, progress)
