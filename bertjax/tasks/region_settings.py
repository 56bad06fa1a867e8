# SPDX-License-Identifier: Apache-2.0
"""The settings in config.task of rows of texts and regions."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections.config_dict import ConfigDict

from bertjax import UserError, registry
from bertjax.data.mixture import read_weights

KINDS = WORDS, REGIONS, PAIRS = 0, 1, 2  # what is predicted in a row
KIND_NAMES = "words", "regions", "pairs"
OF_GROUPS = "loss", "accuracy", "words"  # the metrics of a group of words


class RegionSettings(NamedTuple):
    """The parts of config.task that rows need.

    most: the most regions of an image; width, classes: of npz files; shares: of KINDS;
    truth: the column that says whether the text is true of the image, or ""; hide:
    whether regions are hidden; groups: of words, ((name, (word, ...)), ...).
    """

    most: int
    width: int
    classes: int
    shares: tuple[float, ...]
    truth: str
    hide: bool
    groups: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def kinds(self) -> list[str]:
        """The kinds that are trained, by name; with hidden regions only words."""
        names = zip(KIND_NAMES, self.shares, strict=True)
        least = 1 if self.hide else len(KINDS)
        return [name for name, share in [*names][:least] if share]

    @property
    def group_scores(self) -> tuple[str, ...]:
        """The names of the metrics of groups of words: number_loss, ..."""
        return tuple(f"{name}_{what}" for name, _ in self.groups for what in OF_GROUPS)


def read_settings(task: ConfigDict) -> RegionSettings:
    """Read the settings from config.task. Raises UserError for an invalid value."""
    key, weights = f"task.region_mixture={task.region_mixture}", {}
    try:
        weights = read_weights(task.region_mixture)
    except UserError as e:
        raise UserError(str(e).replace("data.weights", "task.region_mixture")) from None
    for name in weights:
        registry.pick(key, name, dict.fromkeys(KIND_NAMES))
    if not weights:
        raise UserError(f"{key} names none of {', '.join(KIND_NAMES)}")
    total = sum(weights.values())
    settings = RegionSettings(
        task.max_regions,
        task.region_size,
        task.region_classes,
        tuple(weights.get(name, 0.0) / total for name in KIND_NAMES),
        task.label,
        task.hide_regions,
        read_groups(task.word_groups),
    )
    if not settings.kinds:
        raise UserError(f"task.hide_regions=True leaves words alone: {key} has none")
    return settings


def read_groups(text: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Parse "number:one|two,shape:circle". Raises UserError for other formats.

    >>> read_groups("number:one|two,shape:circle")
    (('number', ('one', 'two')), ('shape', ('circle',)))
    """
    groups: dict[str, tuple[str, ...]] = {}
    for entry in registry.split_list(text):
        name, _, words = entry.partition(":")
        found = tuple(word.strip() for word in words.split("|"))
        if not (name.isidentifier() and all(found)) or name in groups:
            raise UserError(
                f"task.word_groups={text}: {entry!r} is not a NAME:WORD|WORD of its own"
            )
        groups[name] = found
    return (*groups.items(),)


def group_ids(
    groups: Sequence[tuple[str, Sequence[str]]], tokenizer: Any
) -> np.ndarray:
    """Return the group of words that each id is in, i8 [V], -1 for none.

    Raises UserError for a word that is not a single piece, or is in two groups.
    """
    out = np.full(tokenizer.vocab_size, -1, np.int8)
    for k, (name, words) in enumerate(groups):
        for word in words:
            # Byte-level BPE has two pieces for a word: one within a text, which must
            # exist, and one at the start of a text.
            forms = [f" {word}", word] if tokenizer.joins_with_space else [word]
            pieces = tokenizer.encode_batch(forms)
            whole = [ids[0] for ids in pieces if len(ids) == 1]
            own = {*whole} - {tokenizer.unk_id}
            if len(pieces[0]) != 1 or pieces[0][0] not in own:
                raise UserError(
                    f"task.word_groups: {name}: {word!r} is not one piece of the "
                    "vocabulary, whose pieces are scored: leave it out"
                )
            if any(out[piece] >= 0 for piece in own):
                raise UserError(f"task.word_groups: {word!r} is there twice")
            out[[*own]] = k
    return out
