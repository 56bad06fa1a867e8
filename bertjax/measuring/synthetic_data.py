# SPDX-License-Identifier: Apache-2.0
"""Make up inputs for measurements: rows, a text, its tokenizer."""

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax.assembly import resolve
from bertjax.data import batches
from bertjax.data.batches import Batches
from bertjax.data.features.base import Features, Spec
from bertjax.data.features.make_features import split_needs
from bertjax.data.masking.vocab_tables import make_tables
from bertjax.data.mixture import make_mixture
from bertjax.data.phases import Wanted
from bertjax.data.sequences.make_plan import limit_segments, make_plan
from bertjax.data.tokenizers.extra_ids import add_extra_ids
from bertjax.data.tokenizers.tokenizer import load_tokenizer
from bertjax.storage.paths import expand
from bertjax.tasks.task_type import find_task_type, with_options

SEQUENCES = 4  # sequences per packed row, if it may have so many


class Shape(NamedTuple):
    """A batch of B rows of L tokens.

    mask_rates: those that its slots must have room for; objective: that of its phases,
    "" for the config's.
    """

    batch_size: int
    length: int
    mask_rates: tuple[Any, ...]
    objective: str = ""


def one_phase(config: ConfigDict) -> ConfigDict:
    """Return a config of one phase: the longest rows, and of these the most."""
    if not config.phases:
        return config
    phases = resolve.wanted_phases(config)
    return of_phase(config, max(phases, key=lambda p: (p.length, p.batch_size)))


def of_phase(config: ConfigDict, phase: Wanted) -> ConfigDict:
    """Return a config with only one of its phases."""
    one = config.copy_and_resolve_references()
    one.phases, one.objective = "", phase.objective or config.objective
    one.batch_size, one.data.length = phase.batch_size, phase.length
    with one.ignore_type():  # a ramp is text, another phase's rate a number
        one.data.mask_rate = phase.mask_rate
    return one


def with_row_sizes(
    config: ConfigDict, text: Sequence[Mapping[str, Any]] | None = None
) -> ConfigDict:
    """Return the config with the sizes of its rows in the objective's options.

    They are the number of choices of multiple choice (0: unknown), the longest target,
    and the number of regions. Other configs are returned unchanged.

    text: what preflight found in data.train, whose rows have room for so many choices;
    without it, the columns that task.choices names.
    """
    task_type = find_task_type(config.objective)
    own = task_type and (task_type.generates or task_type.masks)
    if not task_type or not (task_type.several_sequences or own):
        return config
    options = task_type.head_options(config.task, ())
    if not own and "choices" not in options:
        columns = config.task.choices.count(",") + 1  # a single column has lists
        known = text[0]["sequences_per_row"] if text else columns if columns > 1 else 0
        options = {"choices": known}
    config = config.copy_and_resolve_references()
    config.objective = with_options(config.objective, **options)
    return config


def expected_vocab_size(config: ConfigDict) -> int:
    """Return the vocabulary size without a text: that of data.vocab, if given.

    Raises UserError if data.vocab cannot be read.
    """
    data = config.data
    if config.model.vocab_size or not data.vocab:
        return config.model.vocab_size or data.vocab_size + data.extra_ids
    path = str(expand(data.vocab, "data.vocab"))
    return _count_pieces(path, data.lower_case, data.extra_ids)


@functools.cache
def _count_pieces(path: str, lower_case: bool | None, extra_ids: int) -> int:
    """Count the pieces of a tokenizer and its sentinels; reading one takes a second."""
    return add_extra_ids(load_tokenizer(path, lower_case), extra_ids).vocab_size


def make_features(
    config: ConfigDict, needs: frozenset[str], shape: Shape, vocab_size: int
) -> Features:
    """Build the host half that an objective needs, with a made-up vocabulary."""
    tokenizer = synthetic_tokenizer(vocab_size, config.data.extra_ids)
    tables = make_tables(tokenizer, np.ones(vocab_size))
    config = config.copy_and_resolve_references()
    if config.data.masking == "macbert":
        # A table of similar words would need a real vocabulary.
        config.data.masking = "bert"
    rates = shape.mask_rates
    return resolve.make_features(
        config, needs, tokenizer, tables, shape.length, rates[0], rates
    )


def batch_specs(config: ConfigDict, objective: Any, shape: Shape) -> dict[str, Spec]:
    """Return the specs of all arrays of a batch, including labels of tasks' rows."""
    data, needed = config.data, split_needs(objective.needs)
    features = make_features(
        config, objective.needs, shape, expected_vocab_size(config)
    )
    segments = limit_segments(features.raw, data.packed, data.max_segments)
    specs = batches.batch_specs(features, segments, needed.pair_rule)
    return specs | {
        name: Spec(spec.shape[1:], spec.dtype.name)
        for name, spec in objective.labels(shape.batch_size, shape.length).items()
    }


def make_batches(
    config: ConfigDict, needs: frozenset[str], shape: Shape, vocab_size: int
) -> Batches:
    """Build the pipeline's own batches of this shape from a made-up text of full rows.

    needs: see Objective. Packed rows have SEQUENCES sequences of one length, as far as
    the plan and data.max_segments allow.
    """
    data = config.data
    features = make_features(config, needs, shape, vocab_size)
    sequences = min(data.max_segments or SEQUENCES, SEQUENCES) if data.packed else 1
    slots = features.slots(np.arange(features.raw + 1))
    most = int(np.flatnonzero(slots * sequences <= features.raw).max())
    document = max(most - 3, 2)
    if not data.packed:
        document *= 8  # documents end with a row, or far beyond it
    # Sentences have one token, so that rows end only at their last slot. Turns are as
    # long as answers may be.
    sentence = max(features.limits[0] - 2, 1) if features.limits else 1
    document = max(document // sentence, 2) * sentence
    tokens = document * sequences * min(max(shape.batch_size, 16), 256)
    how = sentence, document, data.extra_ids
    tokenizer, store = synthetic_text(vocab_size, tokens, *how)
    kinds = np.arange(len(store.sentences) - 1, dtype=np.uint16) % 2 + 1
    own = {*features.streams} | ({"speaker"} if features.limits else set())
    store.streams = dict.fromkeys(own, ("sentence", kinds))
    plan = make_plan(
        store,
        data.plan,
        features.raw,
        config.seed,
        short_seq_prob=0.0,
        pair_rule=split_needs(needs).pair_rule,
        packed=data.packed,
        max_segments=data.max_segments,
        slots=slots,
        streams=features.streams,
        limits=features.limits,
    )
    return Batches(
        plans=(plan,),
        mixture=make_mixture({"synthetic": plan.n}),
        features=features,
        specials=tokenizer,
        batch_size=shape.batch_size,
        seed=config.seed,
    )


def synthetic_batch(
    config: ConfigDict, objective: Any, shape: Shape, vocab_size: int
) -> dict[str, np.ndarray]:
    """Build a batch of full rows by the pipeline, with the objective's labels.

    Labels are 0 and their weights 1. If the objective has several sequences per row,
    they are all the same.
    """
    batch = make_batches(config, objective.needs, shape, vocab_size).batch(0)
    for name, spec in objective.labels(shape.batch_size, shape.length).items():
        values = batch.get(name, np.array(spec.dtype.kind == "f"))
        if 0 < values.ndim < len(spec.shape):
            values = values[:, None]
        batch[name] = np.broadcast_to(values, spec.shape).astype(spec.dtype)
    return batch


def synthetic_text(
    vocab_size: int,
    tokens: int = 2_000_000,
    sentence: int = 24,
    document: int = 480,
    extra_ids: int = 0,
) -> tuple[Any, Any]:
    """Make up the tables of a tokenizer, and a store of `tokens` tokens.

    sentence, document: the tokens of each. extra_ids: the number of sentinel ids.
    """
    # Ids in [5, V), the k-th with frequency 1/k, as words in a text.
    draws = np.random.default_rng(0).random(tokens)
    ids = (4 + (vocab_size - extra_ids - 4) ** draws).astype(np.int32)
    sentences = np.arange(0, ids.size + 1, sentence)
    n = sentences.size - 1
    store = SimpleNamespace(
        tokens=ids[: sentences[-1]].astype(np.uint32),
        sentences=sentences,
        documents=np.append(np.arange(0, n, document // sentence), n),
        counts=np.bincount(ids, minlength=vocab_size),
    )
    return synthetic_tokenizer(vocab_size, extra_ids), store


def synthetic_tokenizer(vocab_size: int, extra_ids: int = 0) -> Any:
    """Make up the parts of a tokenizer that batches read.

    The five special ids come first, and sentinels last.
    """
    text = vocab_size - extra_ids
    sentinels = np.arange(text, vocab_size)
    return SimpleNamespace(
        vocab_size=vocab_size,
        pad_id=0,
        unk_id=1,
        cls_id=2,
        sep_id=3,
        mask_id=4,
        has_mask=True,
        special_ids=np.append(np.arange(5), sentinels),
        sentinel_ids=sentinels[::-1],
        replacement_ids=np.arange(5, text, dtype=np.int32),
        word_starts=np.arange(vocab_size) % 4 > 0,
        sentence_ends=np.arange(vocab_size) % 24 == 5,
    )


def synthetic_store(folder: Path, config: ConfigDict, sequences: int) -> Any:
    """Make up a store of offsets in files; its tokens need no disk space.

    Lengths are geometric. Returns an object with the arrays of a Store.
    """
    is_document = config.data.plan == "document"
    mean = 60 if is_document else 1500  # tokens per document
    number = sequences if is_document else sequences * (config.data.length - 2) // 1300
    draws = np.random.default_rng(0)
    tokens = sentences = 0
    with (
        open(folder / "sentences", "wb") as sentence_file,
        open(folder / "documents", "wb") as document_file,
    ):
        for file in (sentence_file, document_file):
            file.write(np.zeros(1, np.int64).data)
        for low in range(0, number, 1 << 18):
            sizes = draws.geometric(25 / mean, min(1 << 18, number - low))
            lengths = draws.geometric(1 / 25, sizes.sum())
            sentence_file.write((tokens + np.cumsum(lengths)).data)
            document_file.write((sentences + np.cumsum(sizes)).data)
            tokens, sentences = tokens + int(lengths.sum()), sentences + len(lengths)
    (folder / "tokens").touch()
    os.truncate(folder / "tokens", 2 * tokens)  # a sparse file: nothing is stored
    files = {"tokens": "<u2", "sentences": "<i8", "documents": "<i8"}
    return SimpleNamespace(
        counts=np.zeros(1, np.int64),
        marks=None,
        content_hash="synthetic",
        **{name: np.memmap(folder / name, kind, "r") for name, kind in files.items()},
    )
