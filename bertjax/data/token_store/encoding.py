# SPDX-License-Identifier: Apache-2.0
"""Encode documents into ids, on all cores, in order, in bounded memory."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from multiprocessing.connection import wait
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.data.corpus.documents import Document
from bertjax.data.corpus.sentences import split_sentences
from bertjax.data.token_store.encode_rows import encode_rows
from bertjax.data.token_store.processes import Context
from bertjax.data.token_store.streams import Stream
from bertjax.data.tokenizers.backends import SPACE_FIRST
from bertjax.data.tokenizers.stream_vocab import TOKEN
from bertjax.data.tokenizers.tokenizer import Tokenizer
from bertjax.data.tokenizers.word_starts import Marker

BLOCK = 1 << 20  # characters of a unit of work
PARAGRAPH = 1 << 20  # characters of the longest piece of a paragraph; part of FORMAT
SMALL = 4  # up to this many blocks no processes are started, which would take longer
HELD = 16  # blocks' worth of characters that are held back, over all groups
BATCH = 1 << 17  # characters per call of the tokenizer, which needs 100 bytes for each


@dataclass
class Block:
    """A unit of work: paragraphs of parts of documents, all of one group.

    For each part, `begins` states whether a document begins with it, `entities` are
    those of its document, `values` those of its paragraphs (Document.values).
    """

    group: str = ""
    parts: list[list[str]] = field(default_factory=list)
    begins: list[bool] = field(default_factory=list)
    entities: list[tuple[str, ...]] = field(default_factory=list)
    characters: int = 0
    values: list[list[dict[str, Any]]] = field(default_factory=list)


class Encoded(NamedTuple):
    """An encoded block.

    tokens: u16 or u32 [n]; lengths: i64 [s], tokens of each sentence; sentences: their
    number in each part; empty: number of sentences without a token, which are left out;
    characters: those of the block; marks: u8 [n], or None without a marker; streams:
    ids by name, [n], or [s] for streams with one value per sentence.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    sentences: Sequence[int]
    begins: Sequence[bool]
    empty: int
    characters: int
    group: str = ""
    marks: np.ndarray | None = None
    streams: Mapping[str, np.ndarray] = MappingProxyType({})


def blocks(documents: Iterable[Document], characters: int = BLOCK) -> Iterator[Block]:
    """Cut documents into blocks of about `characters`, between paragraphs.

    Documents of a group stay in order; if there are several groups, at most HELD blocks
    are held back.

    >>> [b.parts for b in blocks([Document(["ab", "c"]), Document(["d"])], 2)]
    [[['ab']], [['c'], ['d']]]
    """
    pending: dict[str, Block] = {}
    waiting = 0  # characters in all pending blocks
    for document in documents:
        group = document.group
        first = True
        part: list[str] = []
        values: list[dict[str, Any]] = []
        # A paragraph with values is a sentence, and is not cut.
        whole = document.values is not None
        each = document.paragraphs if whole else map(pieces, document.paragraphs)
        cut = each if whole else chain.from_iterable(each)
        for number, paragraph in enumerate(cut):
            if not part:
                block = pending.setdefault(group, Block(group))
                block.parts.append(part)
                block.begins.append(first)
                block.entities.append(document.entities)
                block.values.append(values := [])
                first = False
            part.append(paragraph)
            if document.values is not None:
                values.append(document.values[number])
            block.characters += len(paragraph)
            waiting += len(paragraph)
            if block.characters >= characters:
                waiting -= block.characters
                yield pending.pop(group)
                part = []
        if waiting > HELD * characters:
            group = max(pending, key=lambda g: pending[g].characters)
            waiting -= pending[group].characters
            yield pending.pop(group)
    yield from pending.values()


def pieces(paragraph: str, longest: int = PARAGRAPH) -> Iterator[str]:
    """Cut a paragraph of extreme length, after a full stop, at a space, or anywhere.

    >>> list(pieces("One. Two three.", longest=10))
    ['One.', 'Two three.']
    """
    start = 0
    while len(paragraph) - start > longest:
        end = start + longest
        stop = paragraph.rfind(". ", start, end) + 1
        cut = stop or paragraph.rfind(" ", start + 1, end)
        cut = cut if cut > start else end
        yield paragraph[start:cut]
        start = cut + (paragraph[cut] == " ")
    yield paragraph[start:]


def token_dtype(vocab_size: int) -> str:
    """Return the dtype of stored ids: u16 if they fit, otherwise u32."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def encode_block(
    tokenizer: Tokenizer,
    block: Block,
    marker: Marker | None = None,
    streams: Mapping[str, Stream] = MappingProxyType({}),
) -> Encoded:
    """Split a block's paragraphs into sentences, and encode these into ids.

    Raises UserError if the tokenizer returns an id outside its vocabulary, or if values
    are of another kind than their stream.
    """
    texts, owners, joined = split_block(tokenizer, block)
    values = list(chain.from_iterable(block.values))
    dtype = token_dtype(tokenizer.vocab_size)
    lengths: list[int] = []
    arrays = [np.zeros(0, dtype)]
    marks = [np.zeros(0, np.uint8)]
    ranged = {n: s for n, s in streams.items() if s.kind == TOKEN}
    rows: dict[str, list[np.ndarray]] = {name: [] for name in ranged}
    alone = any(block.entities)  # then a call holds sentences of one part only
    for start, end in _batches(texts, owners if alone else None):
        own = [[value[name] for value in values[start:end]] for name in ranged]
        # Lines of code recur: equal rows are encoded once.
        kinds: dict[tuple[Any, ...], int] = {}
        places = [
            kinds.setdefault(row, len(kinds))
            for row in zip(texts[start:end], joined[start:end], *own, strict=True)
        ]
        entities = block.entities[owners[start]] if alone else ()
        found = encode_rows(tokenizer, kinds, entities, marker, ranged)
        ids = [found.ids[place] for place in places]
        if found.marks is not None:
            marks += [found.marks[place] for place in places]
        for name, each in found.streams.items():
            rows[name] += [each[place] for place in places]
        lengths += map(len, ids)
        flat = np.fromiter(chain.from_iterable(ids), np.int64)
        if len(flat) and not 0 <= flat.min() <= flat.max() < tokenizer.vocab_size:
            raise UserError(
                f"data.vocab: the tokenizer gave id {flat.max()}, but its vocabulary "
                f"has {tokenizer.vocab_size} pieces"
            )
        arrays.append(flat.astype(dtype))
    sizes = np.array(lengths, np.int64)
    owners_of = np.array(owners, np.int64)[sizes > 0]
    aligned = {
        name: np.concatenate([np.zeros(0, stream.dtype), *rows[name]])
        if name in ranged
        else stream.of_sentences(name, values)[sizes > 0]
        for name, stream in streams.items()
    }
    return Encoded(
        tokens=np.concatenate(arrays),
        lengths=sizes[sizes > 0],
        sentences=np.bincount(owners_of, minlength=len(block.parts)).tolist(),
        begins=block.begins,
        empty=int((sizes == 0).sum()),
        characters=block.characters,
        group=block.group,
        marks=None if marker is None else np.concatenate(marks),
        streams=aligned,
    )


def split_block(
    tokenizer: Tokenizer, block: Block
) -> tuple[list[str], list[int], list[bool]]:
    """Return the sentences of a block, the number of the part of each, and whether it
    follows the previous one without a space."""
    texts: list[str] = []
    owners: list[int] = []
    joined: list[bool] = []  # to the previous sentence, without a space
    space_first = tokenizer.kind in SPACE_FIRST
    values = zip_longest(block.parts, block.values)
    for number, (part, own) in enumerate(values):
        if own:  # paragraphs with values are sentences and are never joined
            texts += part
            owners += [number] * len(part)
            joined += [False] * len(part)
            continue
        for paragraph in part:
            if tokenizer.has_sentences:
                sentences = split_sentences(paragraph)
            else:
                sentences = [paragraph] if paragraph.strip() else []
            after = [False] * len(sentences)
            if tokenizer.joins_with_space:
                sentences = with_spaces(paragraph, sentences)
            elif space_first and not all(map(str.isascii, sentences[:-1])):
                spaced = follow_space(paragraph, sentences)
                after = [False, *(not space for space in spaced[1:])]
            texts += sentences
            owners += [number] * len(sentences)
            joined += after
    return texts, owners, joined


def with_spaces(paragraph: str, sentences: list[str]) -> list[str]:
    """Restore the space before sentences, which byte BPE includes in its pieces.

    >>> with_spaces("One.  Two.", ["One.", "Two."])
    ['One.', ' Two.']
    """
    spaced = follow_space(paragraph, sentences)
    return [" " * space + s for space, s in zip(spaced, sentences, strict=True)]


def follow_space(paragraph: str, sentences: list[str]) -> list[bool]:
    """Return which sentences of a paragraph follow a space.

    >>> follow_space("好。是！ One.", ["好。", "是！", "One."])
    [False, False, True]
    """
    text = " ".join(paragraph.split())
    spaced, at = [], 0
    for sentence in sentences:
        spaced.append(text[at] == " ")
        at += spaced[-1] + len(sentence)
    return spaced


def _batches(texts: list[str], owners: list[int] | None) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each tokenizer call; with `owners`, one part per call."""
    start = size = 0
    for at, text in enumerate(texts):
        size += len(text)
        last = at + 1 == len(texts)
        ends = owners is not None and not last and owners[at + 1] != owners[at]
        if size >= BATCH or last or ends:
            yield start, at + 1
            start, size = at + 1, 0


class Encoder:
    """Encodes documents, in this process or with the processes of a pool.

    The number of workers (None: all cores) changes only the speed. The pool starts with
    its first work and ends with the `with` block.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        marker: Marker | None = None,
        workers: int | None = None,
        streams: Mapping[str, Stream] = MappingProxyType({}),
    ) -> None:
        self.tokenizer = tokenizer
        self.marker = marker
        self.streams = dict(streams)
        affinity = getattr(os, "sched_getaffinity", None)  # only on Linux
        cores = len(affinity(0)) if affinity else os.cpu_count()
        self.workers = workers or cores or 1
        self._pool: ProcessPoolExecutor | None = None
        self._stop: Any = None
        self._done: Any = None

    def __enter__(self) -> "Encoder":
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._stop.set()
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def encode(self, block: Block) -> Encoded:
        """Encode one block in this process."""
        return encode_block(self.tokenizer, block, self.marker, self.streams)

    def submit(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Run `function(encoder, *args)` in a process of the pool.

        `encoder` belongs to that process and has one worker.
        """
        if self._pool is None:
            context = Context()
            self._stop, self._done = context.Event(), context.Value("d", 0.0)
            given = (self.tokenizer, self.marker, self.streams)
            given += (self._stop, self._done)
            self._pool = ProcessPoolExecutor(self.workers, context, _begin, given)
        return self._pool.submit(_call, function, args)

    def done(self) -> float:
        """Return the megabytes that workers have reported with `report_to_parent`."""
        return self._done.value if self._done is not None else 0.0

    def documents(self, documents: Iterable[Document]) -> Iterator[Encoded]:
        """Yield the encoded blocks of documents, in order.

        A short text is encoded in this process; otherwise at most 2 `workers` + 1
        blocks are in progress at once.
        """
        work = blocks(documents)
        head = list(islice(work, SMALL + 1)) if self.workers > 1 else []
        if len(head) <= SMALL:
            for block in chain(head, work):
                if _stop is not None and _stop.is_set():
                    raise RuntimeError("stopped, since another piece failed")
                yield self.encode(block)
            return
        with broken_pool():
            under_way: deque[Future[Encoded]] = deque()
            for block in chain(head, work):
                under_way.append(self.submit(Encoder.encode, block))
                if len(under_way) > 2 * self.workers:
                    yield under_way.popleft().result()
            yield from (future.result() for future in under_way)


@contextlib.contextmanager
def broken_pool() -> Iterator[None]:
    """Explain the error that is raised when a worker process has died."""
    try:
        yield
    except BrokenProcessPool as e:
        raise RuntimeError(
            "a worker of prepare was killed (out of memory?); "
            "what was finished is kept, the command can be repeated"
        ) from e


# State of a worker process.
_encoder: Encoder
_stop: Any = None
_done: Any = None


def _begin(
    tokenizer: Tokenizer,
    marker: Marker | None,
    streams: Mapping[str, Stream],
    stop: Any,
    done: Any,
) -> None:
    global _encoder, _stop, _done
    _encoder, _stop, _done = Encoder(tokenizer, marker, 1, streams), stop, done
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the work
    threading.Thread(target=_end_with_parent, daemon=True).start()


def report_to_parent(megabytes: float) -> None:
    """Report text read in this process to the process that started the pool."""
    if _done is not None:
        with _done.get_lock():
            _done.value += megabytes


def _end_with_parent() -> None:
    """End this process if its parent is killed; a pool worker would wait forever."""
    parent = multiprocessing.parent_process()
    with contextlib.suppress(OSError):
        wait([parent.sentinel])
    os._exit(1)


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(_encoder, *args)
