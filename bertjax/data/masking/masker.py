# SPDX-License-Identifier: Apache-2.0
"""Choose the tokens to predict and corrupt them, whole batches at a time.

How tokens are chosen is independent of how they are corrupted: presets.py names the
published combinations, choose.py and ngrams.py choose, PresetMasker and
similar_words.py corrupt. A module from outside the package brings both
(docs/add_a_masker.md). Every random draw has an address (counter_rng.py), so that the
result of a row depends on its own tokens and key alone.
"""

import dataclasses
import numbers
from typing import Any, NamedTuple, Protocol

import numpy as np

from bertjax import UserError, counted, registry
from bertjax.data import counter_rng
from bertjax.data.masking import choose
from bertjax.data.masking.choose import Chosen, Rows
from bertjax.data.masking.concepts import choose_concepts
from bertjax.data.masking.ngrams import choose_ngrams
from bertjax.data.masking.presets import Masking, make_masking
from bertjax.data.masking.vocab_tables import Tables, make_tables

# Keys in config.data.
_KEYS = {"unit": "mask_unit", "lengths": "mask_lengths", "weights": "mask_weights"}
_BLOCK = 1 << 17  # tokens masked at a time: bounds the memory and fits in the cache


class Masked(NamedTuple):
    """The corrupted ids i32 [b, L], and where, what and whether to predict [b, P]."""

    input_ids: np.ndarray
    mlm_positions: np.ndarray
    mlm_ids: np.ndarray
    mlm_weights: np.ndarray


class Masker(Protocol):
    """How tokens are chosen and corrupted; a module's `make_masker` returns one.

    `rate` is the largest share of a row's L tokens that is predicted, in (0, 1]: a row
    has room for P = ceil(rate * L) predictions. Results must depend on the arguments
    alone, and the result of a row on that row alone, so that batches do not depend on
    the batch size, hosts or threads. Draw random numbers with counter_rng and
    `rows.keys`.
    """

    rate: float

    def choose(self, rows: Rows, tables: Any, P: int) -> Chosen:
        """Return the columns to predict, at most P per row."""

    def corrupt(
        self, truth: np.ndarray, chosen: Chosen, rows: Rows, tables: Any
    ) -> np.ndarray:
        """Return the ids that replace the chosen ids `truth`, both i32 [b, W]."""

    def tables(self, tokenizer: Any, counts: np.ndarray | None) -> Any:
        """Return what choose and corrupt need to know about a tokenizer.

        `counts` [V]: how often each id occurs in the training text. The result has
        `vocab_size`, as `Tables` has.
        """
        return make_tables(tokenizer, counts)


@dataclasses.dataclass(frozen=True)
class PresetMasker:
    """The masker of a `Masking`."""

    masking: Masking

    def choose(self, rows: Rows, tables: Tables, P: int) -> Chosen:
        masking, shape = self.masking, rows.ids.shape
        weighted = masking.weights != "uniform"
        if weighted and tables.patience is None:
            raise UserError("data.masking='distilbert' needs the counts of a text")
        free, begins = choose.eligible(rows, masking, tables)
        budget = choose.budgets(rows, masking, P)
        if masking.repeats:
            return choose.choose_repeatedly(rows.keys, free, budget)
        if len(masking.lengths) > 1:
            units = choose.find_units(free, begins)
            return choose_ngrams(rows.keys, units, begins, budget, masking.lengths)
        patience = tables.patience.take(rows.ids) if weighted else None
        noise = choose.draw_noise(rows.keys, shape[1], patience)
        if masking.unit == "token":
            return choose.choose_tokens(noise, free, budget)
        units = choose.find_units(free, begins)
        if masking.unit == "concept":
            marks = np.zeros_like(begins) if rows.marks is None else rows.marks
            unit = choose_concepts(noise, units, begins, marks, budget)
        else:
            unit = choose.choose_units(noise, units, begins, budget)
        return choose.all_tokens(units, unit, None, shape)

    def corrupt(
        self, truth: np.ndarray, chosen: Chosen, rows: Rows, tables: Tables
    ) -> np.ndarray:
        masking = self.masking
        keys, used = rows.keys, chosen.column < rows.ids.shape[1]
        together = {"piece": chosen.column, "word": chosen.word, "span": chosen.span}
        draws = counter_rng.uniform(
            counter_rng.fold(keys, "outcome")[:, None], together[masking.outcome]
        )
        masked = draws < masking.mask_share
        swap = draws < masking.mask_share + masking.random_share
        swap &= used
        if masking.similar:
            similar = _similar_words(truth, used & masked, chosen, keys, tables)
            masked = similar >= 0  # words without a similar word get a random token
            new = np.where(masked, similar, truth)
        else:
            new = np.where(masked, tables.mask_id, truth)
        swap &= ~masked
        row, slot = np.nonzero(swap)
        key, column = counter_rng.fold(keys, "replace")[row], chosen.column[row, slot]
        if masking.replacement == "unigram":
            if tables.unigram is None:
                raise UserError("data.replacement='unigram' needs the counts of a text")
            draw = counter_rng.uniform(key, column)
            index = np.searchsorted(tables.unigram, draw, "right")
        elif masking.random_from == "vocabulary":
            new[row, slot] = counter_rng.below(key, column, tables.vocab_size)
            return new
        else:
            index = counter_rng.below(key, column, len(tables.replacement_ids))
        new[row, slot] = tables.replacement_ids[index]
        return new


def _similar_words(
    truth: np.ndarray,
    where: np.ndarray,
    chosen: Chosen,
    keys: np.ndarray,
    tables: Tables,
) -> np.ndarray:
    """Draw similar words for the words in `where`, bool [b, W]: i32, -1 if none."""
    if tables.similar is None:
        raise UserError("data.masking='macbert' needs data.similar, a table of words")
    new = np.full(truth.shape, -1, np.int32)
    row, slot = np.nonzero(where)
    column, word = chosen.column[row, slot], chosen.word[row, slot]
    first = np.flatnonzero(column == word)
    size = np.diff(first, append=len(word))
    key = counter_rng.fold(keys, "similar")[row[first]]
    ids = truth[row, slot]
    new[row, slot] = tables.similar.draw(ids, first, size, key, word[first])
    return new


def make_masker(
    name: str, rate: float | None = None, **refinements: Any
) -> Masking | Masker:
    """Create the masker that data.masking names: a preset, or "my.module:option=value".

    A module from outside the package has `make_masker(**options) -> Masker`. `rate` is
    one of its options and replaces the one in the name; None keeps that one. The other
    refinements are those of `make_masking` and are for presets only.

    Raises UserError for an unknown preset, module or option, for an invalid rate, and
    for a module that returns no masker.
    """
    if not registry.is_outside(name):
        return make_masking(name, rate=rate, **refinements)
    module, options = registry.load_outside("data.masking", name, "make_masker")
    if given := [refined for refined, value in refinements.items() if value]:
        raise UserError(
            f"data.{_KEYS.get(given[0], given[0])} refines presets, and "
            f"data.masking={name!r} is not a preset: leave the former out, and give "
            f"options of {module.__name__}.make_masker"
        )
    if rate is not None:
        options["rate"] = rate
    masker = registry.make("data.masking", module, "make_masker", options)
    if not (isinstance(masker.rate, numbers.Real) and 0 < masker.rate <= 1):
        raise UserError(
            f"data.masking={name!r}: its rate {masker.rate} is not a number above 0 "
            "and at most 1"
        )
    return masker


def read_masker(data: Any, rate: float | None = None) -> Masking | Masker:
    """Create the masker of data.masking and its refinements, at `rate` if given.

    data: config.data; for an empty key (--config.data.mask_unit=), the preset's value.
    """
    return make_masker(
        data.masking,
        rate=rate,
        unit=data.mask_unit or None,
        lengths=data.mask_lengths or None,
        corruption=data.corruption or None,
        replacement=data.replacement or None,
        weights=data.mask_weights,
        paper_compat=data.paper_compat,
    )


def mask_tokens(
    input_ids: np.ndarray,
    attention_mask: np.ndarray,
    keys: np.ndarray,
    masking: Masking | Masker,
    tables: Any,
    P: int,
    marks: np.ndarray | None = None,
    drawn: list[np.ndarray] | None = None,
) -> Masked:
    """Choose and corrupt tokens; input_ids, attention_mask i32 [b, L], keys u64 [b].

    The result of a row depends on its own tokens and key alone. Returns new input_ids
    i32 [b, L], mlm_positions and mlm_ids i32 [b, P], mlm_weights f32 [b, P]. Positions
    ascend; unused slots hold position 0, id 0 and weight 0. A row never predicts more
    than its budget: single tokens meet it exactly, words and n-grams as nearly as they
    fit.

    Args:
      marks: u8 [b, L], if the store has them: bit 1 begins a word (in place of the
        vocabulary's table), 2 is part of an entity, 4 begins one, 16 is part of a
        word of data.concept.
      drawn: a list to which i64 arrays are appended: the length in units of everything
        chosen. For n-grams these are the drawn lengths (`ngrams.choose_ngrams`).

    Raises IndexError for an id outside the vocabulary; UserError if `tables` lack the
    counts or similar words that the masking needs.

    Sources: Devlin et al. 2019, section 3.1 and appendix A.1; Liu et al. 2019, section
    4.1; google-research/bert's README for whole words; Lan et al. 2020, section 4.1;
    Joshi et al. 2020, section 3.1; Cui et al. 2020, section 3.1.

    Worked example (2 = cls, 3 = sep, 4 = mask, 0 = pad, rate 0.3, P = 3). The row has 6
    real tokens, so round(0.3 * 6) = 2 are predicted: positions 2 and 4 win; 2 draws
    "mask" and 4 draws "random":

        input_ids       2 17 25 31 46  3  0  0
        input_ids'      2 17  4 31 88  3  0  0
        mlm_positions         2     4          0
        mlm_ids              25    46          0
        mlm_weights           1     1          0
    """
    masker = PresetMasker(masking) if isinstance(masking, Masking) else masking
    b, length = input_ids.shape
    predicted = (np.zeros((b, P), dtype) for dtype in (np.int32, np.int32, np.float32))
    out = Masked(input_ids.astype(np.int32), *predicted)
    step = max(1, _BLOCK // length)
    for low in range(0, b, step):
        part = slice(low, low + step)
        block = Masked(*(a[part] for a in out))
        own_marks = None if marks is None else marks[part]
        ids = block.input_ids.view()
        ids.flags.writeable = False  # writing here would corrupt the masker's targets
        rows = Rows(ids, attention_mask[part], keys[part], own_marks)
        chosen = masker.choose(rows, tables, P)
        if not isinstance(masker, PresetMasker):
            _check_chosen(chosen, rows)
        _apply(masker, chosen, rows, tables, block)
        if drawn is not None and chosen.lengths is not None:
            drawn.append(chosen.lengths)
        elif drawn is not None:
            spans = (chosen.column == chosen.span) & (chosen.column < length)
            drawn.append(np.ones(np.count_nonzero(spans), np.int64))
    return out


def _apply(
    masker: Masker, chosen: Chosen, rows: Rows, tables: Any, out: Masked
) -> None:
    """Write the predictions into `out`, whose input_ids are still the original ids."""
    (b, length), width = rows.ids.shape, chosen.column.shape[1]
    if width > (P := out.mlm_ids.shape[1]):
        raise UserError(
            f"data.masking: the masker chose {width} tokens of a row that has room for "
            f"{counted(P, 'prediction')}"
        )
    used = chosen.column < length
    column = np.where(used, chosen.column, 0)
    at = column + np.arange(b)[:, None] * length
    truth = rows.ids.reshape(-1).take(at)
    out.mlm_positions[:, :width] = column
    np.multiply(truth, used, out=out.mlm_ids[:, :width])
    weight = used if chosen.weight is None else np.where(used, chosen.weight, 0)
    out.mlm_weights[:, :width] = weight
    new = masker.corrupt(truth, chosen, rows, tables)
    if not isinstance(masker, PresetMasker):
        _check_ids(np.asarray(new), truth.shape, used, tables.vocab_size)
    ids = out.input_ids.reshape(-1)
    ids[at[used]] = new[used]


def _check_chosen(chosen: Chosen, rows: Rows) -> None:
    """Refuse the result of an outside masker's `choose` unless it holds columns of the
    rows, none of them padding."""
    shape = rows.ids.shape
    columns = getattr(chosen, "column", chosen)
    given = np.shape(columns)
    if not isinstance(chosen, Chosen) or len(given) != 2 or given[0] != shape[0]:
        what = f"{type(chosen).__name__} {list(given)}"
        raise UserError(
            f"data.masking: the masker's choose must return a Chosen with columns of "
            f"{shape[0]} rows, as choose_where makes it, and returned {what}"
        )
    if given[1] and (columns.min() < 0 or columns.max() > shape[1]):
        raise UserError(
            f"data.masking: the masker chose column {columns.min()} to {columns.max()} "
            f"of rows of {shape[1]} tokens"
        )
    used = columns < shape[1]
    if not np.all(np.take_along_axis(rows.real, columns * used, axis=1)[used]):
        raise UserError(
            "data.masking: the masker chose padding, which predicts itself: choose "
            "among is_text(rows, tables), or where rows.real is 1"
        )


def _check_ids(
    new: np.ndarray, shape: tuple[int, ...], used: np.ndarray, vocab_size: int
) -> None:
    """Refuse the result of an outside masker's `corrupt` unless it holds valid ids."""
    right = new.shape == shape and new.dtype.kind in "iu"
    if not right or not np.all((new[used] >= 0) & (new[used] < vocab_size)):
        raise UserError(
            f"data.masking: the masker's corrupt must return ids from 0 to "
            f"{vocab_size - 1}, i32 {list(shape)}, and returned {new.dtype} "
            f"{list(new.shape)}" + f" up to {new.max()}" * right
        )
