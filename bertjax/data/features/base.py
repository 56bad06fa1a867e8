# SPDX-License-Identifier: Apache-2.0
"""The host half of an objective: from gathered rows to the arrays of its batch.

A module of this package (or any dotted name) exports `make_features(settings)`, which
may take options, and an objective names it among its `needs`: "mlm", "my_lab.pairs",
"diffusion:schedule=cosine". What it returns is a `Features`. Its `specs` state every
array of a batch, so that what feeds, measures and compiles has to ask nobody else.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.data.token_flags import BEGINS_WORD

Batch = dict[str, np.ndarray]


class Spec(NamedTuple):
    """An array of a batch: its shape without B, and its dtype.

    loss: a weight of predictions, or what a row's loss is divided by: 0 in rows that
    fill up a last batch of an evaluation.
    """

    shape: tuple[int, ...]
    dtype: str = "int32"
    loss: bool = False


Specs = Mapping[str, Spec]


class Settings(NamedTuple):
    """What a host half is made of: a config's keys, and the text's vocabulary.

    config: the whole config; tables: what masking knows of the vocabulary (that of the
    masker's `tables`); length: L of the batch; mask_rate: of the phase, as the config
    has it; rates: of all phases of this shape, which share their shapes; rows: how
    many neighbouring rows of a batch are of one kind (config.accumulate, since a
    micro-batch takes every so many-th row); tables_of_ids: what the model embeds of
    `model.id_streams`, {name: rows of its table}; streams: those of them that are of
    the text; max_positions: those that the model has.
    """

    config: Any
    tokenizer: Any
    tables: Any
    length: int
    mask_rate: Any = None
    rates: tuple[Any, ...] = (None,)
    rows: int = 1
    tables_of_ids: Mapping[str, int] = MappingProxyType({})
    streams: frozenset[str] = frozenset()
    max_positions: int = 2**31 - 1


class GatheredRows(NamedTuple):
    """Rows of text before anything is predicted.

    arrays: what a plan gathers, [b, raw]; with `marks` u8 of a store that has them.
    keys: u64 [b], which address the draws of each row (counter_rng.py). place: i64 [b],
    the number of each row in the run, or of the example in an evaluation. index: i64
    [b], its number in the batch. progress: the share of the phase that lies behind.
    """

    arrays: Batch
    keys: np.ndarray
    place: np.ndarray
    index: np.ndarray
    progress: float = 1.0


class Features:
    """The host half of an objective; a subclass changes what differs.

    What `make` returns must depend on the row's own arrays, key and place alone, never
    on other rows, so that batches depend on no host, device or batch size.
    keys: the keys of config.data, among KEYS, that it reads; others are refused where
    they are given. streams: those of data.streams that rows bring, as {name}_ids i32
    [b, raw]; those that the model embeds, unless a subclass says otherwise. per_token:
    the arrays that say something of each token: copies of tokens have them too. limits:
    of rows of data.plan=turns alone, slots of an answer and of a context, and
    predictions of a row.
    """

    limits: tuple[int, int, int] | None = None
    keys: frozenset[str] = frozenset()
    streams: frozenset[str] = frozenset()

    def __init__(self, settings: Settings) -> None:
        self.tokenizer, self.length = settings.tokenizer, settings.length
        self.streams = settings.streams
        own = (f"{name}_ids" for name in sorted(settings.streams))
        self.per_token = (*PER_TOKEN, *own)

    @property
    def raw(self) -> int:
        """Tokens, special ones included, that a row of text is planned with."""
        return self.length

    def slots(self, tokens: np.ndarray) -> np.ndarray:
        """Return what sequences of so many tokens, special ones included, take of the
        `raw` slots of a packed row, i64 [n]: `raw` at most where they are so many."""
        return tokens

    def specs(self, gathered: Specs) -> dict[str, Spec]:
        """Return every array of a batch; gathered: those of the plan, [raw]."""
        return dict(gathered)

    def make(self, rows: GatheredRows, drawn: list[np.ndarray] | None = None) -> Batch:
        """Make the arrays of `specs`, [b, ...].

        drawn: receives i64 arrays, the lengths in units of what was chosen as one.
        """
        return without_marks(rows.arrays)

    def tell(self, before: Batch, after: Batch) -> dict[str, float]:
        """Count what was done to a batch, for people; counts of batches are added up.

        before: the gathered arrays, with `marks`, and `keys` as `make` got them; after:
        what it made of them.
        """
        return {}

    def describe(self) -> str:
        """Say in a few words what is predicted, for people; "": nothing."""
        return ""

    def predicted(self, batch: Batch) -> np.ndarray:
        """Say which slots of input_ids show what is predicted: bool [b, L]."""
        return np.zeros(batch["input_ids"].shape, bool)

    def origin(self, batch: Batch) -> np.ndarray | None:
        """Return the column of the gathered row that each slot stands for, [b, L].

        None where slots stand for no column: of rows with a target of their own.
        Raises UserError where rows have more slots than text: their host half says it.
        """
        columns = np.arange(batch["input_ids"].shape[-1])
        if self.raw != self.length:
            raise UserError(
                f"objective: rows of {type(self).__name__} have {len(columns)} slots "
                f"for {self.raw} tokens of text: its `origin` has to say which token "
                "each slot stands for"
            )
        return np.broadcast_to(columns, batch["input_ids"].shape)


# Keys of config.data that host halves read or not. All read those of rows and text.
KEYS = frozenset(
    [
        "masking",
        "mask_rate",
        "mask_unit",
        "mask_lengths",
        "noise",
        "corruption",
        "replacement",
        "similar",
        "swap",
        "mask_weights",
        "max_predictions",
        "paper_compat",
    ]
)


# The tokens of a row: what an encoder reads, and a decoder, and what stands behind a
# passage that a step finds.
SIDES = ("input_ids", "decoder_input_ids", "end_ids")
# Arrays of a row that say something of each token, beside streams.
PER_TOKEN = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "segment_ids",
    "position_ids",
)


def check_mask(settings: Settings) -> None:
    """Refuse a vocabulary that has no mask of its own: UserError."""
    if not settings.tokenizer.has_mask:
        config = settings.config
        raise UserError(
            f"objective={config.objective} hides tokens behind a mask, and the "
            f"vocabulary has none (data.vocab={config.data.vocab}): take one that has, "
            "or objective=clm"
        )


def without_marks(arrays: Batch) -> Batch:
    """Leave out what is in a batch for masking alone."""
    return {name: array for name, array in arrays.items() if name != "marks"}


def percent(share: float) -> str:
    """Write a share for people, to three digits: 15%, 12.5%, 0.1%."""
    return f"{100 * share:.3g}%"


def count_text(batch: Batch) -> int:
    """Count the real tokens of a batch; copies of tokens are none.

    Rows that hold copies say themselves how much text is in them, `text_tokens` [b].
    """
    return int(batch.get("text_tokens", batch["attention_mask"]).sum())


def count_slots(batch: Mapping[str, Any]) -> int:
    """Count the slots of a batch, or of a row by its specs: those of targets too."""
    sides = (batch[name] for name in SIDES if name in batch)
    return sum(int(np.prod(side.shape)) for side in sides)


def encoder_length(length: int, arrays: Mapping[str, Any]) -> int:
    """Return how many tokens an encoder reads of a row of `length` tokens of text: of
    an image the regions stand behind them. arrays: of a batch, or their specs."""
    regions = arrays.get("region_mask")
    return length + (0 if regions is None else regions.shape[-1])


def prediction_specs(name: str, P: int) -> dict[str, Spec]:
    """Return the arrays that say where, what and whether to predict, [P]."""
    return {
        f"{name}_positions": Spec((P,)),
        f"{name}_ids": Spec((P,)),
        f"{name}_weights": Spec((P,), "float32", loss=True),
    }


def predictions(specs: Specs) -> int:
    """Return how many tokens a row can predict: the slots of `prediction_weights`."""
    return sum(int(np.prod(specs[name].shape)) for name in prediction_weights(specs))


def prediction_weights(specs: Specs) -> list[str]:
    """Return the arrays that weigh predictions, not whole rows."""
    return [name for name, spec in specs.items() if spec.loss and spec.shape]


def mark_predictions(batch: Batch, name: str, ahead: int = 0) -> np.ndarray:
    """Return bool [b, L], true where `prediction_specs` of that name predict, or so
    many slots ahead."""
    out = np.zeros(batch["input_ids"].shape, bool)
    row, slot = np.nonzero(batch[f"{name}_weights"])
    out[row, batch[f"{name}_positions"][row, slot] + ahead] = True
    return out


def special_pieces(tokenizer: Any) -> np.ndarray:
    """Say which pieces are special, bool [V]."""
    special = np.zeros(tokenizer.vocab_size, bool)
    special[tokenizer.special_ids] = True
    return special


def count_masks(
    tokenizer: Any, before: Batch, ids: np.ndarray, chosen: np.ndarray
) -> dict[str, int]:
    """Count what became of the chosen tokens, bool [b, L], of `before`; ids: after."""
    special = special_pieces(tokenizer)
    truth, real = before["input_ids"], before["attention_mask"] > 0
    true, seen = truth[chosen], ids[chosen]
    masked, kept = seen == tokenizer.mask_id, seen == true
    drawn = ~masked & ~kept
    # Words are numbered: a special token is one, and behind it one begins.
    alone, marks = special[truth], before.get("marks")
    starts = tokenizer.word_starts[truth] if marks is None else marks & BEGINS_WORD
    starts = (starts > 0) | alone
    starts[:, 1:] |= alone[:, :-1]
    starts[:, 0] = True
    words = np.cumsum(starts.ravel()).reshape(truth.shape) - 1
    pieces = np.bincount(words[real], minlength=words[-1, -1] + 1)
    taken = np.bincount(words[real & chosen], minlength=len(pieces))
    return {
        "selected": true.size,
        "idle": int((~chosen.any(axis=1)).sum()),
        "masked": int(masked.sum()),
        "kept": int(kept.sum()),
        "special_selected": int(special[true].sum()),
        "special_replacements": int(special[seen[drawn]].sum()),
        "partial_words": int(((taken > 0) & (taken < pieces)).sum()),
    }
