# SPDX-License-Identifier: Apache-2.0
"""Decide which token ranges make a sequence, once for the run, and gather them.

A store is any object with three arrays: `tokens` [n], `sentences` [S+1] (token offsets)
and `documents` [D+1] (sentence offsets); both offset arrays begin with 0 and end with
the total. A plan fixes the number of sequences for the whole run, so that seeking is
arithmetic. Kinds:

full_sentences  RoBERTa's FULL-SENTENCES (Liu et al. 2019, section 4.2): whole sentences
                while they fit, across documents with one extra separator between them.
doc_sentences   the same, but a row never crosses a document.
pairs           BERT's create_pretraining_data (Devlin et al. 2019, appendix A.2).
                Chunk boundaries are drawn once; the split, the coin, the random partner
                and the side of truncation are drawn for each (epoch, example). The
                official code rechunks each pass and rewinds after a random partner.
"""

import contextlib
import hashlib
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.data import counter
from bertjax.registry import pick

FORMAT = "plan-1"
_CHUNK = 1 << 20  # sentences planned at a time: bounds the memory of planning
_SMALL = 1 << 20  # tokens: below this, planning is faster than opening a file


class Specials(NamedTuple):
    """The ids a row is framed with; a Tokenizer serves as well."""

    pad_id: int
    cls_id: int
    sep_id: int


@dataclass(frozen=True, eq=False)
class Plan:
    """What sequences exist. `starts` [n+1] i64 holds token offsets (sentence kinds) or
    sentence offsets (pairs); sequence i lies in [starts[i], starts[i+1])."""

    kind: str
    length: int
    starts: np.ndarray
    tokens: np.ndarray  # [tokens], u16 or u32
    sentences: np.ndarray  # [S+1] token offsets, strictly increasing for pairs
    documents: np.ndarray  # [D+1] sentence offsets (pairs) or token offsets, increasing
    counts: np.ndarray | None  # [V] how often each id occurs, where the store knows
    seed: int
    short_seq_prob: float

    @property
    def n(self) -> int:
        """The number of sequences."""
        return len(self.starts) - 1

    @property
    def room(self) -> int:
        """Tokens that fit in a row beside its special tokens."""
        return self.length - (3 if self.kind == "pairs" else 2)

    def check_ids(self, vocab_size: int) -> None:
        """Raise UserError when the text holds an id that is not below vocab_size."""
        if self.counts is not None:
            largest = int(np.flatnonzero(self.counts).max(initial=0))
        else:
            largest = int(self.tokens.max())
        if largest >= vocab_size:
            raise UserError(
                f"the token store holds id {largest}, but the vocabulary ends at "
                f"{vocab_size - 1}: prepare the text again with this data.vocab"
            )


KINDS = {"full_sentences": 3, "doc_sentences": 3, "pairs": 5}  # and the shortest length


def make_plan(
    store: Any,
    kind: str,
    length: int,
    seed: int,
    *,
    short_seq_prob: float = 0.1,
    cache: str | Path | None = None,
) -> Plan:
    """Plan the sequences of a store; L = `length` counts the special tokens.

    With `cache`, a directory, and a store that has a `content_hash`, large plans are
    kept in a memory-mapped .npy file named by a hash of all that decides them.
    Raises UserError for an unknown kind, a length without room for text, or a store
    without text.

    Worked example (kind full_sentences, length 6, so 4 tokens to a row; two documents
    of sentences [10 11] [12] and [20 21] [22]):
    rows `cls 10 11 12 sep pad` and `cls 20 21 22 sep pad`; with length 8 the first is
    `cls 10 11 12 sep 20 21 sep`, the separator between the documents counting in the 6.
    """
    shortest = pick("data.plan", kind, KINDS)
    if length < shortest:
        raise UserError(f"data.length={length} is too short for data.plan={kind!r}")
    tokens = np.asarray(store.tokens)
    sentences = np.asarray(store.sentences)
    documents = np.unique(np.asarray(store.documents))
    if kind == "pairs":
        sentences, documents = _without_empty(sentences, documents)
    else:
        documents = np.unique(sentences[documents])
    if len(documents) < 2 or not len(tokens):
        raise UserError("data.train or data.valid holds no text: not one token")
    counts = getattr(store, "counts", None)
    plan = Plan(
        kind, length, np.zeros(1, np.int64), tokens, sentences, documents,
        None if counts is None else np.asarray(counts), seed, short_seq_prob,
    )  # fmt: skip
    content = getattr(store, "content_hash", None)
    if cache is None or content is None or len(tokens) < _SMALL:
        return replace(plan, starts=_starts(plan))
    decides = [FORMAT, content, kind, length]
    if kind == "pairs":
        decides += [seed, short_seq_prob]
    name = hashlib.sha256(repr(decides).encode()).hexdigest()[:32]
    return replace(plan, starts=_kept(Path(cache) / f"plan-{name}.npy", plan))


def _kept(path: Path, plan: Plan) -> np.ndarray:
    """Open the starts from a file; make the file when it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, EOFError):
        return np.asarray(np.load(path, mmap_mode="r"))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(part, "wb") as file:
            np.save(file, _starts(plan))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return np.asarray(np.load(path, mmap_mode="r"))


def _without_empty(
    sentences: np.ndarray, documents: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Drop sentences without tokens, and the documents that this empties."""
    starts = range(0, len(sentences) - 1, _CHUNK)
    if all((np.diff(sentences[i : i + _CHUNK + 1]) > 0).all() for i in starts):
        return sentences, documents
    full = np.unique(sentences)
    return full, np.unique(np.searchsorted(full, sentences[documents]))


def _starts(plan: Plan) -> np.ndarray:
    chunks = _pair_starts(plan) if plan.kind == "pairs" else _sentence_starts(plan)
    end = len(plan.sentences) - 1 if plan.kind == "pairs" else len(plan.tokens)
    return np.concatenate([*chunks, np.array([end], np.int64)])


def _chase(follow: np.ndarray, i: int, stop: int) -> tuple[np.ndarray, int]:
    """Follow i -> follow[i] while i < stop; return the visited and the first beyond."""
    visited, follow = [], follow.tolist()
    while i < stop:
        visited.append(i)
        i = follow[i]
    return np.array(visited, np.int64), i


def _sentence_starts(plan: Plan) -> Iterable[np.ndarray]:
    """Yield the token offsets at which rows begin, a part of the corpus at a time.

    Sentences longer than the room are cut into pieces of it. Each change of document
    moves the tokens behind it up by a gap of one separator, or by more than a row where
    rows must not cross; then a piece fits if its shifted end does, and the piece at
    which the next row begins is found for all pieces by one binary search.
    """
    tok, room = plan.sentences, plan.room
    gap = 1 if plan.kind == "full_sentences" else room + 1
    total, start = len(plan.tokens), 0
    for low in range(0, len(tok) - 1, _CHUNK):
        high = min(low + _CHUNK, len(tok) - 1)
        # a row that begins before `high` ends at most `room` tokens and a piece later
        ahead = int(np.searchsorted(tok, min(tok[high] + 2 * room, total)))
        left = tok[low:ahead]
        lengths = tok[low + 1 : ahead + 1] - left
        count = -(-lengths // room)
        first = np.cumsum(count) - count
        inside = np.arange(count.sum()) - np.repeat(first, count)
        begin = np.repeat(left, count) + inside * room
        size = np.minimum(np.repeat(lengths, count) - inside * room, room)
        shift = (np.searchsorted(plan.documents, begin, "right") - 1) * gap
        follow = np.searchsorted(begin + size + shift, begin + shift + room, "right")
        i = int(np.searchsorted(begin, start))
        visited, i = _chase(follow, i, int(np.searchsorted(begin, tok[high])))
        yield begin[visited]
        start = int(begin[i]) if i < len(begin) else total


def _pair_starts(plan: Plan) -> Iterable[np.ndarray]:
    """Yield the sentence offsets at which chunks begin, a part at a time."""
    tok, docs, start = plan.sentences, plan.documents, 0
    for low in range(0, len(tok) - 1, _CHUNK):
        high = min(low + _CHUNK, len(tok) - 1)
        document = np.searchsorted(docs, np.arange(low, high), "right") - 1
        ends = tok[low : min(high + plan.room, len(tok) - 1) + 1]
        wanted = tok[low:high] + _targets(plan, document)
        follow = np.minimum(low + np.searchsorted(ends, wanted), docs[document + 1])
        visited, i = _chase(follow - low, start - low, high - low)
        yield visited + low
        start = i + low


def _targets(plan: Plan, document: np.ndarray) -> np.ndarray:
    """Return how many tokens the chunks of these documents aim at: i64."""
    key = counter.fold(plan.seed, "target", document)
    short = counter.uniform(key, 0) < plan.short_seq_prob
    return np.where(short, 2 + counter.below(key, 1, plan.room - 1), plan.room)


class Pairs(NamedTuple):
    """Two token ranges a row, each i64 [b], and the labels i32 [b] of the pair."""

    a_start: np.ndarray
    a_stop: np.ndarray
    b_start: np.ndarray
    b_stop: np.ndarray
    labels: dict[str, np.ndarray]


class Chunks(NamedTuple):
    """What a pair rule decides upon, each [b]: the keys and document of the row, and
    its sentences [start, stop), of which those before `split` are A."""

    keys: np.ndarray
    document: np.ndarray
    start: np.ndarray
    split: np.ndarray
    stop: np.ndarray


def _in_order(plan: Plan, c: Chunks) -> Pairs:
    """Take the rest of the chunk as B; a chunk of one sentence has no B."""
    tok = plan.sentences
    return Pairs(tok[c.start], tok[c.split], tok[c.split], tok[c.stop], {})


def _next_sentence(plan: Plan, c: Chunks) -> Pairs:
    """Let B follow A (label 0), or be drawn from another document (label 1).

    Devlin et al. 2019, section 3.1, task 2. B is random by a fair coin, and always when
    the chunk is one sentence. With a single document the partner comes from it, yet is
    not the true next sentence as long as there is another.
    """
    tok, docs = plan.sentences, plan.documents
    key = counter.fold(c.keys, "next")
    random = (c.split == c.stop) | (counter.bits(key, 0) >> np.uint64(63) == 1)
    n = len(docs) - 1
    if n > 1:
        other = counter.below(key, 1, n - 1)
        other += other >= c.document
        first, size = docs[other], docs[other + 1] - docs[other]
        begin = first + counter.below(key, 2, size)
    else:
        other, size = c.document, docs[1]
        shun = (c.split < size) & (size > 1)
        begin = counter.below(key, 2, size - shun)
        begin += shun & (begin >= c.split)
    missing = _targets(plan, c.document) - (tok[c.split] - tok[c.start])
    end = np.searchsorted(tok, tok[begin] + missing)
    end = np.clip(end, begin + 1, docs[other + 1])  # a sentence at least
    b_start = np.where(random, tok[begin], tok[c.split])
    b_stop = np.where(random, tok[end], tok[c.stop])
    labels = {"nsp_labels": random.astype(np.int32)}
    return Pairs(tok[c.start], tok[c.split], b_start, b_stop, labels)


PAIR_RULES = {"nsp": _next_sentence}


def gather(
    plan: Plan, ids: np.ndarray, keys: np.ndarray, pair_rule: str | None, specials: Any
) -> dict[str, np.ndarray]:
    """Make the rows of examples `ids` [b], drawing with `keys` u64 [b].

    Returns input_ids, token_type_ids and attention_mask, i32 [b, L], and the labels of
    the pair rule, i32 [b]. `pair_rule` is "nsp", or None: B is the rest of the chunk.
    `specials` has pad_id, cls_id and sep_id. Sentence kinds take no pair rule.

    Worked example (pairs, L = 9, chunk of sentences [10 11] [12 13], split after the
    first, not random): input_ids `cls 10 11 sep 12 13 sep pad pad`, token_type_ids
    `0 0 0 0 1 1 1 0 0`, attention_mask `1 1 1 1 1 1 1 0 0`, nsp_labels `0`. A pair of
    more than L - 3 tokens loses tokens from its longer side (B when both are equal)
    until it fits, each from the front or the back with equal chance.
    """
    ids = np.asarray(ids)
    if plan.kind == "pairs":
        return _gather_pairs(plan, ids, keys, pair_rule, specials)
    if pair_rule is not None:
        raise UserError(
            f"data.plan={plan.kind!r} makes no pairs; use data.plan='pairs'"
        )
    return _gather_sentences(plan, ids, specials)


def _gather_sentences(plan: Plan, ids: np.ndarray, specials: Any) -> dict:
    start, stop = plan.starts[ids], plan.starts[ids + 1]
    source = start[:, None] + np.arange(-1, plan.length - 1)
    size = stop - start
    first = np.searchsorted(plan.documents, start, "right")
    crossings = np.searchsorted(plan.documents, stop, "left") - first
    crossed = np.flatnonzero(crossings)
    if crossed.size:
        count = crossings[crossed]
        size[crossed] += count
        row = np.repeat(np.arange(crossed.size), count)
        nth = np.arange(row.size) - np.repeat(np.cumsum(count) - count, count)
        edge = plan.documents[np.repeat(first[crossed], count) + nth]
        between = np.zeros((crossed.size, plan.length), bool)
        between[row, edge - start[crossed][row] + 1 + nth] = True
        source[crossed] -= np.cumsum(between, axis=1)
    rows = _framed(plan, source, size + 2, specials)
    if crossed.size:
        hit, column = np.nonzero(between)
        rows["input_ids"][crossed[hit], column] = specials.sep_id
    rows["token_type_ids"] = np.zeros_like(rows["input_ids"])
    return rows


def _framed(plan: Plan, source: np.ndarray, used: np.ndarray, specials: Any) -> dict:
    """Fetch tokens [b, L] and set cls, the last sep and padding; `used` [b] counts."""
    real = np.arange(plan.length) < used[:, None]
    input_ids = plan.tokens.take(source, mode="clip").astype(np.int32)
    np.copyto(input_ids, np.int32(specials.pad_id), where=~real)
    input_ids[:, 0] = specials.cls_id
    input_ids[np.arange(len(used)), used - 1] = specials.sep_id
    return {"input_ids": input_ids, "attention_mask": real.astype(np.int32)}


def _draw_pairs(
    plan: Plan, ids: np.ndarray, keys: np.ndarray, pair_rule: str | None
) -> tuple[Pairs, np.ndarray, np.ndarray]:
    """Return the pairs of examples and how many tokens of A and of B do not fit."""
    rule = _in_order if pair_rule is None else pick("pair rule", pair_rule, PAIR_RULES)
    start, stop = plan.starts[ids], plan.starts[ids + 1]
    document = np.searchsorted(plan.documents, start, "right") - 1
    m = stop - start
    split = counter.below(counter.fold(keys, "split"), 0, np.maximum(m - 1, 1))
    pair = rule(plan, Chunks(keys, document, start, start + 1 + split, stop))
    sizes = pair.a_stop - pair.a_start, pair.b_stop - pair.b_start
    return pair, *trim(*sizes, plan.room)


def truncated(
    plan: Plan, ids: np.ndarray, keys: np.ndarray, pair_rule: str | None
) -> np.ndarray:
    """Count the tokens that `gather` cuts off each row, i64 [b]; 0 for sentences."""
    if plan.kind != "pairs":
        return np.zeros(len(ids), np.int64)
    _, cut_a, cut_b = _draw_pairs(plan, np.asarray(ids), keys, pair_rule)
    return cut_a + cut_b


def _gather_pairs(
    plan: Plan, ids: np.ndarray, keys: np.ndarray, pair_rule: str | None, specials: Any
) -> dict:
    pair, cut_a, cut_b = _draw_pairs(plan, ids, keys, pair_rule)
    a, b = pair.a_stop - pair.a_start, pair.b_stop - pair.b_start
    a_start = pair.a_start + _front(keys, "front of a", cut_a)
    b_start = pair.b_start + _front(keys, "front of b", cut_b)
    a, b = a - cut_a, b - cut_b
    at = np.arange(plan.length)
    in_b = at > (a + 1)[:, None]
    source = np.where(in_b, (b_start - a - 2)[:, None], (a_start - 1)[:, None]) + at
    rows = _framed(plan, source, a + 2 + b + (b > 0), specials)
    rows["input_ids"][np.arange(len(a)), a + 1] = specials.sep_id
    rows["token_type_ids"] = in_b * rows["attention_mask"]
    return rows | pair.labels


def trim(a: np.ndarray, b: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Count the tokens to remove from lengths a and b, i64 [b], so that they fit.

    Closed form of "while too long, remove one from the longer; from B if equal".

    >>> [int(n) for n in trim(np.array(9), np.array(4), 8)]
    [5, 0]
    >>> [int(n) for n in trim(np.array(9), np.array(8), 8)]
    [5, 4]
    """
    excess = np.maximum(a + b - room, 0)
    first = np.minimum(excess, np.abs(a - b))
    rest = excess - first
    longer = a > b
    return first * longer + rest // 2, first * ~longer + (rest + 1) // 2


def _front(keys: np.ndarray, name: str, cut: np.ndarray) -> np.ndarray:
    """Draw how many of `cut` removed tokens go from the front, each by a fair coin."""
    return counter.binomial_half(counter.fold(keys, name), cut)
