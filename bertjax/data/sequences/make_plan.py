# SPDX-License-Identifier: Apache-2.0
"""Decide once for a run which token ranges make a sequence, and which sequences a row.

A store is any object with three arrays: `tokens` [n], `sentences` [S+1] (token offsets)
and `documents` [D+1] (sentence offsets); both offset arrays begin with 0 and end with
the total. Kinds of plans:

full_sentences  RoBERTa's FULL-SENTENCES (Liu et al. 2019, section 4.2): whole sentences
                while they fit, across documents with one extra separator between them.
doc_sentences   the same, but a sequence never crosses a document.
sentence_starts the same, and the row is filled with the beginning of the sentence that
                did not fit, with which the next sequence begins.
document        one document; a longer one is cut, without regard to its sentences.
pairs           sentence pairs of chunks of a document (sentence_pairs.py).
turns           a turn of a conversation, after the turns before it (turns.py).

If rows are packed, each row holds several sequences and every sequence is in exactly
one row (packing.py); the sequences are the same as without packing.
"""

import contextlib
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from bertjax import UserError
from bertjax.data.sequences import chunks, packing, sentence_pairs, turns
from bertjax.data.sequences.plan import Plan
from bertjax.data.sequences.sentence_pairs import PAIR_RULES
from bertjax.registry import pick
from bertjax.storage import directories

FORMAT = "plan-3"
_SMALL = 1 << 20  # tokens: below this, planning is faster than opening a file
KINDS = {  # kind -> shortest length
    "full_sentences": 3, "doc_sentences": 3, "sentence_starts": 3, "document": 3,
    "pairs": 5, "turns": 8,
}  # fmt: skip


def make_plan(
    store: Any,
    kind: str,
    length: int,
    seed: int,
    *,
    short_seq_prob: float = 0.1,
    pair_rule: str | None = None,
    packed: bool = False,
    max_segments: int | None = None,
    cache: str | Path | None = None,
    slots: np.ndarray | None = None,
    streams: Iterable[str] = (),
    limits: tuple[int, int, int] | None = None,
) -> Plan:
    """Plan the rows of a store; L = `length` counts the special tokens.

    slots: i64 [L + 1], how many of the L slots of a packed row a sequence of each
    number of tokens occupies; None: as many as it has tokens. streams: the streams of
    the store that rows bring. limits: for kind turns, the values of turns.Limits.

    `pair_rule`, for kind pairs only, is a name in PAIR_RULES. A packed row holds at
    most `max_segments` sequences, by default L / 16 and at least 4. With `cache`, a
    directory, and a store that has a `content_hash`, large plans are stored as memory
    maps, in a directory named by a hash of everything that determines them.

    Raises UserError for an unknown kind or rule, a rule for another kind than pairs, a
    length without room for text, or a store that yields no sequence or lacks a stream.

    Kind full_sentences, two documents of sentences [10 11] [12] and [20 21] [22]:

        length 6   cls  10  11  12 sep pad
                   cls  20  21  22 sep pad
        length 8   cls  10  11  12 sep  20  21 sep    the first sep counts as text
                   cls  22 sep pad pad pad pad pad
    """
    shortest = pick("data.plan", kind, KINDS)
    if length < shortest:
        raise UserError(f"data.length={length} is too short for data.plan={kind!r}")
    if pair_rule is not None:
        pick("pair rule", pair_rule, PAIR_RULES)
        if kind != "pairs":
            raise UserError(f"data.plan={kind!r} makes no pairs; use data.plan='pairs'")
    cap = limit_segments(length, packed, max_segments)
    if not len(store.tokens):
        raise UserError("data.train or data.valid holds no text: not one token")
    counts, marks = getattr(store, "counts", None), getattr(store, "marks", None)
    nothing = np.zeros(0, np.int64)
    plan = Plan(
        kind, length, seed, short_seq_prob, pair_rule, cap,
        nothing, nothing, None, None, None, {},
        np.asarray(store.tokens),
        np.asarray(store.sentences, np.int64), np.asarray(store.documents, np.int64),
        None if counts is None else np.asarray(counts),
        None if marks is None else np.asarray(marks),
        _find_streams(store, streams),
        *_find_turns(store, kind, limits),
    )  # fmt: skip
    content = getattr(store, "content_hash", None)
    if cache is not None and content is not None and len(plan.tokens) >= _SMALL:
        name = _name(plan, content, slots)
        arrays = _cached(Path(cache) / name, plan, slots)
        if arrays is not None:
            return replace(plan, **arrays)
    if not (chunks.is_clean(plan.sentences) and chunks.is_clean(plan.documents)):
        # Drop sentences without tokens, and documents without sentences.
        sentences = np.unique(plan.sentences)
        edges = plan.sentences[np.unique(plan.documents)]
        documents = np.unique(np.searchsorted(sentences, edges))
        plan = replace(plan, sentences=sentences, documents=documents)
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    skipped = _fill(plan, lambda name, values: columns[name].append(values), slots)
    whole = {name: np.concatenate(arrays) for name, arrays in columns.items()}
    return replace(plan, **_arrays(whole, skipped))


def _name(plan: Plan, content: str, slots: np.ndarray | None) -> str:
    """Return the directory name of a plan: a hash of everything that determines it."""
    kind, seed, packed = plan.kind, plan.seed, plan.packed
    decides = [FORMAT, content, kind, plan.length]
    decides += [seed, plan.short_seq_prob, plan.pair_rule] if kind == "pairs" else []
    decides += [*plan.limits] if plan.limits is not None else []
    decides += [seed, plan.max_segments] if packed else []
    if packed and slots is not None:
        decides += [hashlib.sha256(slots.tobytes()).hexdigest()]
    # Cached plans without this word drew one short target per document, not per chunk.
    decides += ["chunks"] if kind == "pairs" and not packed else []
    return f"plan-{hashlib.sha256(repr(decides).encode()).hexdigest()[:32]}"


def _find_streams(
    store: Any, names: Iterable[str]
) -> dict[str, tuple[str, np.ndarray]]:
    """Return the named streams of a store, sorted by name. Raises UserError."""
    known, found = getattr(store, "streams", {}), {}
    for name in sorted(names):
        if name not in known:
            raise UserError(
                f"data.train or data.valid has no stream `{name}`: give "
                f"data.streams={','.join([*known, name])}"
            )
        kind, ids = known[name]
        found[name] = kind, np.asarray(ids)
    return found


def _find_turns(
    store: Any, kind: str, limits: tuple[int, int, int] | None
) -> tuple[np.ndarray | None, turns.Limits | None]:
    """Return the speaker of each sentence, and the limits. Raises UserError.

    Both are None for kinds other than turns.
    """
    if (kind == "turns") != (limits is not None):
        raise UserError(
            f"data.plan={kind}: rows of turns go with an objective that answers, such "
            "as objective=dialogue, and with no other"
        )
    if limits is None:
        return None, None
    ((_, speakers),) = _find_streams(store, ["speaker"]).values()
    return speakers, turns.Limits(*limits)


def limit_segments(length: int, packed: bool, most: int | None) -> int | None:
    """Return how many sequences a row may hold; None: rows are not packed."""
    return (most or max(4, length // 16)) if packed else None


def _cached(path: Path, plan: Plan, slots: np.ndarray | None) -> dict[str, Any] | None:
    """Open a plan's arrays; create them if they are missing or damaged.

    Returns None if the text has empty sentences or documents (stores of bertjax have
    none): such a plan needs offsets of its own.
    """
    offsets = plan.sentences, plan.documents
    arrays = _opened(path)
    if arrays is None:
        for array in offsets:
            chunks.advise(array, "MADV_NORMAL")
        if not all(map(chunks.is_clean, offsets)):
            return None
        if _opened(path) is None:  # no other process has created it meanwhile
            directories.remove(path)
        directories.make_whole(path, lambda part: _write_arrays(part, plan, slots))
        arrays = _opened(path)
    aligned = (ids for _, ids in plan.streams.values())
    for array in (
        plan.tokens, *offsets, plan.marks, *aligned, *(arrays or {}).values()
    ):  # fmt: skip
        chunks.advise(array, "MADV_RANDOM")
    return arrays


def _opened(path: Path) -> dict[str, Any] | None:
    """Map the arrays of a directory; return None if it is incomplete."""
    try:
        about = json.loads((path / "plan.json").read_text("utf-8"))
        columns = {}
        for name, (dtype, size) in about["columns"].items():
            columns[name] = np.asarray(np.memmap(path / f"{name}.bin", dtype, "r"))
            if len(columns[name]) != size:
                return None
        return _arrays(columns, about["skipped"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _arrays(columns: dict[str, np.ndarray], skipped: dict[str, int]) -> dict[str, Any]:
    """Name columns as in Plan; without stops, a sequence ends where the next begins."""
    edges = columns["starts"]
    if "stops" not in columns:
        columns = columns | {"starts": edges[:-1], "stops": edges[1:]}
    return columns | {"skipped": skipped}


def _write_arrays(path: Path, plan: Plan, slots: np.ndarray | None) -> None:
    """Plan everything and write it into the files of a directory."""
    files: dict[str, IO[bytes]] = {}
    sizes: dict[str, tuple[str, int]] = {}
    with contextlib.ExitStack() as stack:

        def add(name: str, values: np.ndarray) -> None:
            if name not in files:
                files[name] = stack.enter_context(open(path / f"{name}.bin", "wb"))
            files[name].write(values.data)
            sizes[name] = values.dtype.str, files[name].tell() // values.itemsize

        skipped = _fill(plan, add, slots)
    about = json.dumps({"columns": sizes, "skipped": skipped})
    (path / "plan.json").write_text(about, "utf-8")


Add = Callable[[str, np.ndarray], None]  # appends values to the column of that name


def _fill(plan: Plan, add: Add, slots: np.ndarray | None) -> dict[str, int]:
    """Plan everything into columns; return what was skipped."""
    skipped: Counter[str] = Counter()
    lengths = _sequences(plan, add, skipped)
    if not plan.packed:
        for _ in lengths:
            pass
        return dict(skipped)
    add("rows", np.zeros(1, np.int64))
    done = 0
    for window, sizes in enumerate(_regrouped(lengths, packing.WINDOW)):
        sizes = sizes if slots is None else slots[sizes]
        number, members = packing.pack(
            sizes, plan.length, plan.max_segments, plan.seed, window
        )
        add("rows", done + np.cumsum(number))
        add("members", (done + members).astype(_index(plan), copy=False))
        done += len(sizes)
    return dict(skipped)


def _index(plan: Plan) -> str:
    """Return a dtype for the numbers of sequences and documents."""
    # An upper bound: each sequence ends with a sentence, or with a full piece of one.
    most = len(plan.sentences) + len(plan.tokens) // plan.room
    return "<u4" if most < 1 << 32 else "<i8"


def _sequences(plan: Plan, add: Add, skipped: Counter[str]) -> Iterator[np.ndarray]:
    """Plan the sequences into columns; yield the slots that each occupies, i64."""
    gaps = plan.pair_rule in sentence_pairs.SKIPS_SINGLE
    apart, end = gaps or plan.kind in ("turns", "sentence_starts"), None
    if plan.kind == "turns":
        blocks = turns.turn_blocks(plan, plan.length, plan.limits, skipped)
    elif plan.kind == "pairs":
        blocks = chunks.pair_blocks(
            plan, plan.length, plan.seed, plan.short_seq_prob, plan.pair_slots
        )
    elif plan.kind == "document":
        blocks = chunks.document_blocks(plan, plan.length)
    else:
        cross, whole = plan.kind == "full_sentences", plan.kind != "sentence_starts"
        blocks = chunks.sentence_blocks(plan, plan.length, cross, whole)
    for block in blocks:
        if gaps:
            alone = block.stop - block.start == 1
            first = block.start[alone]  # the only sentence of each such chunk
            if first.size:
                lost = plan.sentences[first + 1] - plan.sentences[first]
                skipped["chunks of one sentence"] += len(lost)
                skipped["tokens in chunks of one sentence"] += int(lost.sum())
            block = chunks.Block(*(column[~alone] for column in block))
        if apart:
            add("stops", block.stop)
        add("starts", block.start)
        if plan.kind in ("pairs", "full_sentences", "turns"):
            add("document", block.document.astype(_index(plan), copy=False))
        if len(block.stop):
            end = block.stop[-1:]
        yield block.slots
    if end is None and plan.kind == "turns":
        fits = f"that fits in data.length={plan.length}"
        why = f"no turn of a conversation has one before it {fits}"
        if skipped["conversations of a single turn"] == len(plan.documents) - 1:
            why = "every conversation has a single turn, so that there is no answer"
        raise UserError(f"data.train or data.valid: {why}")
    if end is None:
        raise UserError(
            f"data.train or data.valid: no chunk of {plan.length} tokens has the two "
            f"sentences that {plan.pair_rule} needs"
        )
    if not apart:
        add("starts", end)


def _regrouped(arrays: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yield the same values in arrays of `size`, the last one shorter."""
    waiting, n = [], 0
    for array in arrays:
        waiting.append(array)
        n += len(array)
        if n >= size:
            whole = np.concatenate(waiting)
            cut = n - n % size
            yield from whole[:cut].reshape(-1, size)
            waiting, n = [whole[cut:]], n - cut
    if n:
        yield np.concatenate(waiting)
