# SPDX-License-Identifier: Apache-2.0
"""The host half of an objective: it turns gathered rows into the arrays of a batch.

A module of this package (or any dotted name) exports `make_features(settings)`, which
may accept options and returns a `Features`. An objective names the module among its
`needs`: "mlm", "my_lab.pairs", "diffusion:schedule=cosine". The `specs` of a `Features`
state every array of a batch, so that the code that feeds, measures and compiles needs
no other source.
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

    loss: whether the array weighs predictions or divides the loss of a row. Such arrays
    are 0 in the rows that fill up the last batch of an evaluation.
    """

    shape: tuple[int, ...]
    dtype: str = "int32"
    loss: bool = False


Specs = Mapping[str, Spec]


class Settings(NamedTuple):
    """What a host half is created from: the config, the vocabulary and the shapes.

    config: the whole config; tables: what masking knows about the vocabulary (the
    result of the masker's `tables`); length: L of the batch; mask_rate: that of the
    phase, as in the config; rates: the mask rates of all phases with the same length,
    batch size and objective, which share their array shapes; rows: how many neighboring
    rows of a batch are of one kind (config.accumulate, because a micro-batch takes
    every accumulate-th row); tables_of_ids: the id streams of `model.id_streams` that
    the model embeds, {name: rows of its table}; streams: those of them that come from
    the text; max_positions: the number of positions that the model has.
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

    arrays: the arrays that a plan gathers, [b, raw], and `marks` u8 if the store has
    them. keys: u64 [b], the keys of each row's random draws (counter_rng.py). place:
    i64 [b], the number of each row in the run, or of the example in an evaluation.
    index: i64 [b], the number of each row in the batch. progress: the share of the
    phase that is over.
    """

    arrays: Batch
    keys: np.ndarray
    place: np.ndarray
    index: np.ndarray
    progress: float = 1.0


class Features:
    """The host half of an objective; a subclass overrides what differs.

    The result of `make` for a row must depend on the row's own arrays, key and place
    alone, never on other rows, so that batches do not depend on hosts, devices or the
    batch size. keys: the keys of config.data, among KEYS, that it reads; giving any
    other of KEYS is an error. streams: the data.streams that rows bring, as {name}_ids
    i32 [b, raw]; by default those that the model embeds. per_token: the arrays with one
    value per token; copies of tokens copy them too. limits: only for rows of
    data.plan=turns: slots of an answer, slots of a context, and predictions per row.
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
        """Tokens, special ones included, that the plan puts into a row of text."""
        return self.length

    def slots(self, tokens: np.ndarray) -> np.ndarray:
        """Return how many of the `raw` slots of a packed row a sequence occupies, i64
        [n], for each number of tokens (special ones included); `raw` at most for `raw`
        tokens."""
        return tokens

    def specs(self, gathered: Specs) -> dict[str, Spec]:
        """Return every array of a batch; gathered: the arrays of the plan, [raw]."""
        return dict(gathered)

    def make(self, rows: GatheredRows, drawn: list[np.ndarray] | None = None) -> Batch:
        """Create the arrays of `specs`, [b, ...].

        drawn: a list to which i64 arrays are appended: the length in units of each
        group of units that was chosen as one.
        """
        return without_marks(rows.arrays)

    def count(self, before: Batch, after: Batch) -> dict[str, float]:
        """Count what was done to a batch, for people; counts of batches are added up.

        before: the gathered arrays, with `marks`, and with `keys` as `make` got them;
        after: the batch that `make` created from them.
        """
        return {}

    def describe(self) -> str:
        """Return in a few words what is predicted, for people; "" if nothing is."""
        return ""

    def predicted(self, batch: Batch) -> np.ndarray:
        """Return which slots of input_ids hide a predicted token: bool [b, L]."""
        return np.zeros(batch["input_ids"].shape, bool)

    def origin(self, batch: Batch) -> np.ndarray | None:
        """Return the column of the gathered row that each slot stands for, [b, L].

        None if slots do not correspond to columns, as in rows with a separate target.
        Raises UserError if rows have more slots than text; such a host half must
        override this method.
        """
        columns = np.arange(batch["input_ids"].shape[-1])
        if self.raw != self.length:
            raise UserError(
                f"objective: rows of {type(self).__name__} have {len(columns)} slots "
                f"for {self.raw} tokens of text: its `origin` has to say which token "
                "each slot stands for"
            )
        return np.broadcast_to(columns, batch["input_ids"].shape)


# The keys of config.data that a host half reads or not. The other keys of config.data
# are about rows and text; every host half reads those.
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


# The arrays of tokens of a row: what an encoder reads, what a decoder reads, and what
# follows a passage that is retrieved during a step.
SIDES = ("input_ids", "decoder_input_ids", "end_ids")
# Arrays of a row with one value per token, besides streams.
PER_TOKEN = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "segment_ids",
    "position_ids",
)


def check_mask(settings: Settings) -> None:
    """Refuse a vocabulary without a mask token: raise UserError."""
    if not settings.tokenizer.has_mask:
        config = settings.config
        raise UserError(
            f"objective={config.objective} hides tokens behind a mask, and the "
            f"vocabulary has none (data.vocab={config.data.vocab}): take one that has, "
            "or objective=clm"
        )


def without_marks(arrays: Batch) -> Batch:
    """Return a batch without the marks, which are for masking alone."""
    return {name: array for name, array in arrays.items() if name != "marks"}


def percent(share: float) -> str:
    """Format a share for people, to three digits: 15%, 12.5%, 0.1%."""
    return f"{100 * share:.3g}%"


def count_text(batch: Batch) -> int:
    """Count the real tokens of a batch, without copies of tokens.

    Rows that hold copies state in `text_tokens` [b] how much text is in them.
    """
    return int(batch.get("text_tokens", batch["attention_mask"]).sum())


def count_slots(batch: Mapping[str, Any]) -> int:
    """Count the slots of a batch, or of a row given its specs, targets included."""
    sides = (batch[name] for name in SIDES if name in batch)
    return sum(int(np.prod(side.shape)) for side in sides)


def encoder_length(length: int, arrays: Mapping[str, Any]) -> int:
    """Return how many tokens an encoder reads for a row of `length` tokens of text: the
    regions of an image follow the text. arrays: those of a batch, or their specs."""
    regions = arrays.get("region_mask")
    return length + (0 if regions is None else regions.shape[-1])


def prediction_specs(name: str, P: int) -> dict[str, Spec]:
    """Return the arrays that state where, what and whether to predict, [P]."""
    return {
        f"{name}_positions": Spec((P,)),
        f"{name}_ids": Spec((P,)),
        f"{name}_weights": Spec((P,), "float32", loss=True),
    }


def predictions(specs: Specs) -> int:
    """Return how many tokens a row can predict: the slots of `prediction_weights`."""
    return sum(int(np.prod(specs[name].shape)) for name in prediction_weights(specs))


def prediction_weights(specs: Specs) -> list[str]:
    """Return the names of the arrays that weigh predictions, not whole rows."""
    return [name for name, spec in specs.items() if spec.loss and spec.shape]


def mark_predictions(batch: Batch, name: str, ahead: int = 0) -> np.ndarray:
    """Return bool [b, L], true at the slots where `prediction_specs` of that name
    predict, moved `ahead` slots to the right."""
    out = np.zeros(batch["input_ids"].shape, bool)
    row, slot = np.nonzero(batch[f"{name}_weights"])
    out[row, batch[f"{name}_positions"][row, slot] + ahead] = True
    return out


def special_pieces(tokenizer: Any) -> np.ndarray:
    """Return which pieces are special, bool [V]."""
    special = np.zeros(tokenizer.vocab_size, bool)
    special[tokenizer.special_ids] = True
    return special


def count_masks(
    tokenizer: Any, before: Batch, ids: np.ndarray, chosen: np.ndarray
) -> dict[str, int]:
    """Count what became of the chosen tokens of `before`; ids are those after.

    chosen: bool [b, L]; ids: i32 [b, L].
    """
    special = special_pieces(tokenizer)
    truth, real = before["input_ids"], before["attention_mask"] > 0
    true, seen = truth[chosen], ids[chosen]
    masked, kept = seen == tokenizer.mask_id, seen == true
    drawn = ~masked & ~kept
    # Number the words: a special token is a word, and a new word begins after it.
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
