# SPDX-License-Identifier: Apache-2.0
"""Prepare the text of a config: tokenizer, token stores, or a task's rows."""

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

# Version of the rules that make rows, recorded in run.json (`row_rules`; 1 if
# absent). Since 2, unpacked pairs draw short targets for chunks, and mixtures
# draw rows in passes.
ROW_RULES = 2


def prepare(config: ConfigDict, say: Callable[[str], None]) -> text.Prepared:
    """Prepare or reuse the tokenizer and token stores, or a task's labeled rows."""
    if tasks.is_task(config):
        return tasks.prepare(config, say)
    return settle(config, text.prepare_data(**inputs(config), say=say))


def settle(config: ConfigDict, prepared: text.Prepared) -> text.Prepared:
    """Sort components by name, because their order determines batches.

    Raises UserError for names, which a field may supply, that do not go together.
    """
    _check_components(config, prepared.parts, prepared.valid)
    return prepared._replace(parts=dict(sorted(prepared.parts.items())))


def check_inputs(config: ConfigDict) -> None:
    """Refuse missing or unreadable files quickly, before importing jax."""
    if not config.data.train:
        what = "text, for instance --config.data.train='corpus/*.txt' or builtin:docs"
        if task_type := shipped_task_type(config.objective):
            rows = "triples" if task_type.make_graph else "labelled rows"
            what = f"{rows}, {task_type.file_names}: --config.data.train=FILE "
            what += "and --config.data.valid=FILE"
        elif config.data.plan == "turns":
            what = "conversations, for instance --config.data.train=chats.jsonl"
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
    if not data.group_field:  # otherwise the names are known only once the text is read
        _check_components(config, train, valid)
        for key in ("alpha", "vocab_alpha"):
            if data[key] is not None and len(train) == 1:
                raise UserError(
                    f"data.{key}={data[key]}: data.train has one component, there is "
                    "nothing to mix"
                )
    text.check_inputs(**inputs(config))


def check_concepts(config: ConfigDict) -> None:
    """Refuse concept heads and masks without the concept's words. Raises UserError."""
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
    """Raise UserError for a config whose text is a task's rows, which need no store."""
    if tasks.is_task(config) or shipped_task_type(config.objective):
        raise UserError(
            f"objective={config.objective}: token stores are made of running text, "
            "and this is a task, whose rows bertjax.train reads itself"
        )


def _check_components(
    config: ConfigDict, train: Mapping[str, Any], valid: Mapping[str, Any]
) -> None:
    """Refuse component names that conflict or do not match data.weights."""
    mixture.check_names(train, valid, config.data.alpha)
    if config.data.weights:
        weights = mixture.read_weights(config.data.weights)
        mixture.mixture_shares(dict.fromkeys(train, 1), weights)


def inputs(config: ConfigDict) -> dict[str, Any]:
    """Return the arguments of `prepare_data` that a config determines."""
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
    """Use the default data.cache if the config's is another machine's; say so."""
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
    """Return the hash of each store (train, train/NAME, NAME) and of each file."""
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


def other_files(before: Mapping[str, Any], config: ConfigDict) -> list[str]:
    """Return the keys of files beside data.train that changed, as "task.index".

    A task's rows are made from them too, so the hashes of the rows cover their content.
    before: the config in a checkpoint.
    """
    keys = ("data", "entities"), ("task", "index")
    return [
        f"{part}.{key}"
        for part, key in keys
        if before.get(part, {}).get(key, "") != config[part][key]
    ]


def check_rows(
    config: ConfigDict, parts: Mapping[str, Any], path: Any, rules: int
) -> None:
    """Refuse to resume in a workdir whose rows were made by older rules.

    It accepts configs whose rows did not change. parts: the stores of data.train.
    Raises UserError.
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
    """Count how often each id occurs in the stores: i64 [V]."""
    return np.sum([store.counts for store in stores.values()], axis=0)
