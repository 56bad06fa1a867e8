# SPDX-License-Identifier: Apache-2.0
"""From a config to its prepared text: tokenizer, token stores, or a task's rows."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.config.schema import base
from bertjax.data import mixture
from bertjax.data.corpus.sources import named_sources
from bertjax.data.masking.similar_words import NONE
from bertjax.data.token_store import prepare_data as text
from bertjax.data.token_store.cache import open_cache
from bertjax.data.token_store.store import Store
from bertjax.data.tokenizers.tokenizer import Tokenizer
from bertjax.objectives import parse as parse_objective
from bertjax.storage.paths import expand
from bertjax.tasks import prepare_task as tasks
from bertjax.tasks.task_type import shipped_task_type

# By which rules rows are made, as run.json says of a run (`row_rules`; 1 without it).
# 2: unpacked pairs draw short targets for chunks, and mixtures give rows in passes.
ROW_RULES = 2


def prepare(config: ConfigDict, say: Callable[[str], None]) -> text.Prepared:
    """Prepare or reuse tokenizer and token stores; of a task its labelled rows."""
    if tasks.is_task(config):
        return tasks.prepare(config, say)
    return settle(config, text.prepare_data(**inputs(config), say=say))


def settle(config: ConfigDict, prepared: text.Prepared) -> text.Prepared:
    """Put components in the order of their names, which decides batches.

    Raises UserError for names, which a field may give, that do not go together.
    """
    _check_components(config, prepared.parts, prepared.valid)
    return prepared._replace(parts=dict(sorted(prepared.parts.items())))


def check_inputs(config: ConfigDict) -> None:
    """Refuse missing or unreadable files, in a moment and before jax is imported."""
    if not config.data.train:
        what = "text, for instance --config.data.train='corpus/*.txt' or builtin:docs"
        if task_type := shipped_task_type(config.objective):
            what = f"labelled rows, {task_type.file_names}: --config.data.train=FILE "
            what += "and --config.data.valid=FILE"
        raise UserError(f"data.train is empty: give {what}")
    if tasks.is_task(config):
        tasks.check(config)
        return
    data = config.data
    if data.masking == "macbert" and not data.similar:
        raise UserError(
            f"data.masking={data.masking} replaces words by similar ones: give a file "
            "of them, --config.data.similar=FILE, which bertjax.prepare "
            f"--similar=FILE writes, or --config.data.similar={NONE}"
        )
    check_concepts(config)
    train = named_sources(data.train, "data.train")
    valid = named_sources(data.valid, "data.valid")
    if "train" in valid:
        raise UserError("data.valid: `train` is the training text's own name")
    if not data.group_field:  # then the names are known when the text was read
        _check_components(config, train, valid)
        for key in ("alpha", "vocab_alpha"):
            if data[key] is not None and len(train) == 1:
                raise UserError(
                    f"data.{key}={data[key]}: data.train has one component, there is "
                    "nothing to mix"
                )
    text.check_inputs(**inputs(config))


def check_concepts(config: ConfigDict) -> None:
    """Refuse heads and masks of a concept whose words are not given: UserError."""
    parts = {part.name for part in parse_objective(config.objective)}
    for key in ("concept", "control"):
        unit = config.data.mask_unit == key
        if (unit or key in parts) and not config.data[key]:
            what = "data.mask_unit" if unit else "objective"
            raise UserError(
                f"{what}={key} needs the words that it is about: give data.{key}, a "
                "file or words:good,bad"
            )


def refuse_task(config: ConfigDict) -> None:
    """Raise UserError for a config whose text are a task's rows: no store is made."""
    if tasks.is_task(config) or shipped_task_type(config.objective):
        raise UserError(
            f"objective={config.objective}: token stores are made of running text, "
            "and this is a task, whose rows bertjax.train reads itself"
        )


def _check_components(
    config: ConfigDict, train: Mapping[str, Any], valid: Mapping[str, Any]
) -> None:
    """Refuse names that do not go with each other or with data.weights."""
    mixture.check_names(train, valid, config.data.alpha)
    if config.data.weights:
        weights = mixture.read_weights(config.data.weights)
        mixture.mixture_shares(dict.fromkeys(train, 1), weights)


def inputs(config: ConfigDict) -> dict[str, Any]:
    """Return what `prepare_data` takes of a config."""
    data, keys = config.data, "train valid vocab_size lower_case cache max_line_bytes"
    keys += " text_field group_field entity_field code_field streams segmenter"
    keys += " extra_ids concept control"
    weighed = data.vocab_alpha is None
    return {
        **{key: data[key] for key in keys.split()},
        "vocab": str(expand(data.vocab, "data.vocab")) if data.vocab else "",
        "tokenizer_kind": data.tokenizer,
        "layout": "turns" if data.plan == "turns" else "",
        "vocab_alpha": data.alpha if weighed else data.vocab_alpha,
        "vocab_weights": mixture.read_weights(data.weights) if weighed else None,
    }


def settle_cache(config: ConfigDict, say: Callable[[str], None]) -> None:
    """Take the default data.cache where the config's is of another machine; say so."""
    default = base().data.cache
    try:
        open_cache(config.data.cache)
    except UserError as e:
        if config.data.cache == default:
            raise
        say(f"{e}: {default} is taken")
        config.data.cache = default


def prepare_valid(
    config: ConfigDict, tokenizer: Tokenizer, say: Callable[[str], None]
) -> dict[str, Store]:
    """Prepare or reuse the stores of data.valid alone: {name: store}."""
    return text.Work(inputs(config), None, say, tokenizer).finish().valid


def content_hashes(config: ConfigDict, prepared: text.Prepared) -> dict[str, str]:
    """Return the hash of each store (train, train/NAME, NAME) and of files."""
    hashes = {
        name if name == "train" else f"train/{name}": store.content_hash
        for name, store in prepared.parts.items()
    }
    hashes |= {name: store.content_hash for name, store in prepared.valid.items()}
    for key in ("similar", "mask_weights", "swap"):
        if (name := config.data[key]) not in ("", NONE):
            with open(expand(name, f"data.{key}"), "rb") as file:
                hashes[f"data.{key}"] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def check_rows(
    config: ConfigDict, parts: Mapping[str, Any], path: Any, rules: int
) -> None:
    """Refuse to go on in a workdir whose rows were made by older rules: UserError.

    Unless the rows of this config are what they were. parts: the stores of data.train.
    """
    data, what = config.data, ""
    if len(parts) > 1:
        what = f"a mixture (data.train has {len(parts)} components)"
    elif not tasks.is_task(config) and data.plan == "pairs" and not data.packed:
        what = "unpacked pairs (data.plan=pairs)" if data.short_seq_prob else ""
    if rules < 2 and what:
        raise UserError(
            f"--workdir={path} was begun by an older version, which made other rows of "
            f"{what}: finish it with that version (run.json names its commit), or "
            f"begin a new workdir with --config.init_from={path}"
        )


def count_tokens(stores: Mapping[str, Any]) -> np.ndarray:
    """Add up how often each id occurs in the stores: i64 [V]."""
    return np.sum([store.counts for store in stores.values()], axis=0)
