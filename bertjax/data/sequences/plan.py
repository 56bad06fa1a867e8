# SPDX-License-Identifier: Apache-2.0
"""The rows of a run: which token ranges make a sequence, and which sequences a row.

A plan (make_plan.py) fixes the number of rows for the whole run, so that seeking is
arithmetic. A sequence is `cls`, then its parts, each followed by `sep`: the two halves
of a pair, or the text that it holds of each document. A row is one sequence, or several
if packed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.ragged import ramps
from bertjax.data.sequences import chunks, sentence_pairs, turns
from bertjax.data.sequences.chunks import Parts


@dataclass(frozen=True, eq=False)
class Plan:
    """All sequences of a run: sequence i is [starts[i], stops[i]), in token offsets, or
    in sentence offsets for pairs and turns. If packed, row r holds
    members[rows[r] : rows[r + 1]]. `document` is set for pairs, turns and
    full_sentences."""

    kind: str
    length: int
    seed: int
    short_seq_prob: float
    pair_rule: str | None  # for pairs: a name in PAIR_RULES, or None: in order
    max_segments: int | None  # the most sequences a row may hold; None: not packed
    starts: np.ndarray  # i64 [sequences]
    stops: np.ndarray  # i64 [sequences]
    document: np.ndarray | None  # u32 or i64 [sequences]: the one each begins in
    rows: np.ndarray | None  # i64 [n+1]
    members: np.ndarray | None  # u32 or i64 [sequences]
    skipped: dict[str, int]  # how much of the text is in no sequence, and why
    tokens: np.ndarray  # [tokens], u16 or u32
    sentences: np.ndarray  # i64 [S+1] token offsets, strictly increasing
    documents: np.ndarray  # i64 [D+1] sentence offsets, strictly increasing
    counts: np.ndarray | None  # [V] how often each id occurs, if the store knows
    marks: np.ndarray | None  # u8 [tokens], if the store has them
    # Ids that are gathered as {name}_ids: ("token", [tokens]) or ("sentence", [S]).
    streams: Mapping[str, tuple[str, np.ndarray]] = field(default_factory=dict)
    speakers: np.ndarray | None = None  # [S], only for turns (turns.py)
    limits: turns.Limits | None = None  # only for turns

    @property
    def packed(self) -> bool:
        """Whether a row may hold several sequences."""
        return self.max_segments is not None

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return len(self.starts)

    @property
    def n(self) -> int:
        """The number of rows."""
        return self.sequences if self.rows is None else len(self.rows) - 1

    @property
    def room(self) -> int:
        """The tokens that fit in a row besides the special tokens of one sequence."""
        return self.length - (3 if self.kind == "pairs" else 2)

    def pair_tokens(
        self, size: np.ndarray, sentences: np.ndarray, target: np.ndarray
    ) -> np.ndarray:
        """Return the tokens that packed pairs of chunks of `size` tokens may have.

        The number is fixed before a pair is drawn, i64 [k]: the chunk's own tokens, at
        most `room`. Under NSP a single sentence needs a partner: its pair may reach the
        chunk's target, but grows at most by the mean size of a document.
        """
        if self.pair_rule == "nsp":
            mean = len(self.tokens) // (len(self.documents) - 1)
            alone = np.maximum(size, np.minimum(target, size + mean))
            size = np.where(sentences == 1, alone, size)
        return np.minimum(size, self.room)

    def pair_slots(
        self, size: np.ndarray, sentences: np.ndarray, target: np.ndarray
    ) -> np.ndarray:
        """Return `pair_tokens` plus the special tokens, i64 [k]."""
        halves = 2 - ((sentences == 1) & (self.pair_rule is None))
        return self.pair_tokens(size, sentences, target) + 1 + halves

    def gather(
        self, ids: np.ndarray, keys: np.ndarray, specials: Any
    ) -> dict[str, np.ndarray]:
        """Return the rows of examples `ids` [b]; draws use `keys` u64 [b].

        Returns input_ids, token_type_ids and attention_mask, i32 [b, L], and the
        labels of the plan's pair rule, i32 [b]; without a rule B is the rest of the
        chunk. `specials` has pad_id, cls_id and sep_id. If the store has marks there is
        `marks`, u8 [b, L], 0 at special tokens. Each of `streams` adds {name}_ids, i32
        [b, L], also 0 there. Rows of turns have role_ids and turn_ids, i32 [b, L].

        Packed rows also have segment_ids, i32 [b, L] (1, 2, ... in order, 0 for
        padding) and position_ids, i32 [b, L], which restart with each sequence. With S
        the most sequences that a row may hold, they have cls_positions, i32 [b, S], and
        cls_weights, f32 [b, S], 1 if there is a sequence; labels are i32 [b, S].

        A pair of more than L - 3 tokens loses tokens from its longer side (B if both
        are equal) until it fits, each from the front or the back with equal chance.

        Pairs, L = 9, a chunk of sentences [10 11] [12 13], split after the first:

            input_ids       cls  10  11 sep  12  13 sep pad pad
            token_type_ids    0   0   0   0   1   1   1   0   0
            attention_mask    1   1   1   1   1   1   1   0   0
            nsp_labels        0

        Packed, L = 8, documents [10 11] and [12]:

            input_ids       cls  10  11 sep cls  12 sep pad
            segment_ids       1   1   1   1   2   2   2   0
            position_ids      0   1   2   3   0   1   2   0
            cls_positions     0               4
        """
        s = _sequences(self, ids, keys)
        labels: dict[str, np.ndarray] = {}
        if self.kind == "pairs":
            parts, labels = _pair_parts(self, s)
        elif self.kind == "full_sentences":
            parts = _parts_by_document(self, s)
        else:
            start, stop = self.starts[s.number], self.stops[s.number]
            if self.kind == "turns":
                document = self.document[s.number]
                parts = turns.find_parts(self, start, stop, document)
            else:
                parts = Parts(start, stop, np.arange(len(start)))
        rows, begin = _framed(self, parts, s, len(ids), specials)
        if self.packed:
            labels["cls_positions"] = (begin - s.row * self.length).astype(np.int32)
            labels["cls_weights"] = np.ones(len(begin), np.float32)
            for name, values in labels.items():
                labels[name] = np.zeros((len(ids), self.max_segments), values.dtype)
                labels[name][s.row, s.nth] = values
        return rows | labels

    def truncated(self, ids: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Count the tokens cut off each row, i64 [b]; only pairs are cut."""
        if self.kind != "pairs":
            return np.zeros(len(ids), np.int64)
        s = _sequences(self, ids, keys)
        _, cut = _draw_pairs(self, s)
        return np.bincount(s.row, cut.sum(1), minlength=len(ids)).astype(np.int64)

    def documents_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the document that each of these rows begins in, i64 [n]."""
        first = rows if self.rows is None else self.members[self.rows[rows]]
        if self.document is not None:
            return self.document[first].astype(np.int64)
        begins = self.sentences[self.documents[:-1]]
        return np.searchsorted(begins, self.starts[first], "right") - 1

    def check_ids(self, vocab_size: int) -> None:
        """Raise UserError if the text holds an id that is not below vocab_size."""
        known = self.counts is not None
        ids = np.flatnonzero(self.counts) if known else self.tokens
        if (largest := int(ids.max(initial=0))) >= vocab_size:
            raise UserError(
                f"the token store holds id {largest}, but the vocabulary ends at "
                f"{vocab_size - 1}: prepare the text again with this data.vocab"
            )


def row_specs(
    length: int,
    max_segments: int | None,
    pair_rule: str | None,
    streams: Iterable[str] = (),
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the arrays that `gather` creates for a row, without marks.

    The result is {name: (shape, dtype)}. max_segments: None unless rows are packed.
    streams: names of the streams that rows bring.
    """
    row, packed = (length,), max_segments is not None
    names = ["input_ids", "attention_mask", "token_type_ids"]
    names += ["segment_ids", "position_ids"] * packed
    names += [f"{name}_ids" for name in sorted(streams)]
    specs = dict.fromkeys(names, (row, "int32"))
    sequences = (max_segments,) if packed else ()
    if packed:
        specs["cls_positions"] = sequences, "int32"
        specs["cls_weights"] = sequences, "float32"
    if pair_rule:
        specs[f"{pair_rule}_labels"] = sequences, "int32"
    return specs


class _Sequences(NamedTuple):
    """The sequences of some rows in order, each array [k]: the number of the row, from
    0; of the sequence in its row, from 0; of the sequence in the plan; and its key."""

    row: np.ndarray
    nth: np.ndarray
    number: np.ndarray
    keys: np.ndarray


def _sequences(plan: Plan, ids: np.ndarray, keys: np.ndarray) -> _Sequences:
    ids = np.asarray(ids)
    row = np.arange(len(ids))
    if not plan.packed:
        return _Sequences(row, np.zeros_like(row), ids, keys)
    first = plan.rows[ids]
    count = plan.rows[ids + 1] - first
    row = np.repeat(row, count)
    nth = ramps(count)
    number = plan.members[np.repeat(first, count) + nth]
    if plan.kind == "pairs":
        keys = counter_rng.fold(keys[row], "sequence", nth)
    return _Sequences(row, nth, number, keys)


def _parts_by_document(plan: Plan, s: _Sequences) -> Parts:
    """Cut sequences at the ends of documents within them."""
    start, stop = plan.starts[s.number], plan.stops[s.number]
    tok, docs = plan.sentences, plan.documents
    edge = plan.document[s.number].astype(np.int64) + 1
    of = at = np.arange(len(start))
    crossings = [(of, start)]
    while at.size:
        cut = tok[docs[edge[at]]]
        inside = cut < stop[at]
        at = at[inside]
        edge[at] += 1
        crossings.append((at, cut[inside]))
    of = np.concatenate([c[0] for c in crossings])
    order = np.argsort(of, kind="stable")
    of = of[order]
    start = np.concatenate([c[1] for c in crossings])[order]
    last = np.append(of[1:] != of[:-1], True)
    return Parts(start, np.where(last, stop[of], np.append(start[1:], 0)), of)


def _draw_pairs(plan: Plan, s: _Sequences) -> tuple[sentence_pairs.Pairs, np.ndarray]:
    """Return the pairs of chunks, and the tokens of A and B that do not fit [k, 2]."""
    start, stop = plan.starts[s.number], plan.stops[s.number]
    document = plan.document[s.number].astype(np.int64)
    m = stop - start
    key = counter_rng.fold(s.keys, "split")
    split = counter_rng.below(key, 0, np.maximum(m - 1, 1))
    room: Any = plan.room
    target = chunks.targets(plan.seed, plan.short_seq_prob, room, start)
    if plan.packed:
        size = plan.sentences[stop] - plan.sentences[start]
        room = target = plan.pair_tokens(size, m, target)
    c = sentence_pairs.Chunks(
        plan.sentences, plan.documents, s.keys, document,
        start, start + 1 + split, stop, target, plan.room,
    )  # fmt: skip
    rule = plan.pair_rule
    draw = sentence_pairs.PAIR_RULES[rule] if rule else sentence_pairs.in_order
    pair = draw(c)
    a, b = (pair.stop - pair.start).T
    return pair, np.stack(sentence_pairs.trim(a, b, room), 1)


def _pair_parts(plan: Plan, s: _Sequences) -> tuple[Parts, dict[str, np.ndarray]]:
    pair, cut = _draw_pairs(plan, s)
    front = np.empty_like(cut)
    for half, name in enumerate(("front of a", "front of b")):
        # A fair coin decides whether a removed token is the first or the last one.
        key = counter_rng.fold(s.keys, name)
        front[:, half] = counter_rng.binomial_half(key, cut[:, half])
    start, stop = pair.start + front, pair.stop + front - cut
    present = stop > start
    present[:, 0] = True
    return Parts(start[present], stop[present], np.nonzero(present)[0]), pair.labels


def _framed(
    plan: Plan, parts: Parts, s: _Sequences, b: int, specials: Any
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Lay parts out in b rows; return the arrays [b, L] and the starts of sequences in
    the flattened rows, i64 [k].

    Values of a part are repeated over its slots; the last part of a row also covers the
    padding, which is blanked afterwards.
    """
    shape, slots = (b, plan.length), b * plan.length
    row = s.row[parts.of]
    first = np.append(True, parts.of[1:] != parts.of[:-1])[: len(row)]
    opens = first if parts.opens is None else parts.opens
    closes = np.ones(len(row), bool) if parts.closes is None else parts.closes
    size = parts.stop - parts.start + closes + opens
    used = np.bincount(row, size, minlength=b).astype(np.int64)
    at = np.cumsum(size) - size  # in rows without padding
    at += np.arange(b)[row] * plan.length - (np.cumsum(used) - used)[row]
    count = np.diff(at, append=slots)
    slot = np.arange(slots)
    source = np.repeat(parts.start - at - opens, count)
    source += slot
    real = np.arange(plan.length) < used[:, None]
    sep = (at + size - 1)[closes]
    cls, begin = at[opens], at[first]

    ids = plan.tokens.take(source, mode="clip").astype(np.int32)
    ids[sep] = specials.sep_id
    ids[cls] = specials.cls_id
    ids = ids.reshape(shape)
    np.copyto(ids, np.int32(specials.pad_id), where=~real)
    mask = real.astype(np.int32)
    rows = {"input_ids": ids, "attention_mask": mask}

    def spread(values: np.ndarray) -> np.ndarray:
        return np.repeat(values.astype(np.int32), count).reshape(shape) * mask

    pairs = plan.kind == "pairs"
    rows["token_type_ids"] = spread(~opens) if pairs else np.zeros(shape, np.int32)
    rows |= {name: spread(values) for name, values in parts.values.items()}
    if plan.packed:
        rows["segment_ids"] = spread(s.nth[parts.of] + 1)
        starts = np.repeat(begin[parts.of].astype(np.int32), count)
        place = slot.astype(np.int32) - starts
        rows["position_ids"] = place.reshape(shape) * mask
    if plan.marks is not None:
        marks = plan.marks.take(source, mode="clip")
        marks[sep] = marks[cls] = 0
        rows["marks"] = marks.reshape(shape) * real
    for name, (kind, values) in plan.streams.items():
        at = source
        if kind == "sentence":
            at = np.searchsorted(plan.sentences, source, "right") - 1
        own = values.take(at, mode="clip").astype(np.int32)
        own[sep] = own[cls] = 0
        rows[f"{name}_ids"] = own.reshape(shape) * mask
    return rows, begin
