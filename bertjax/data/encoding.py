# SPDX-License-Identifier: Apache-2.0
"""Documents to ids, on all cores, in order, in bounded memory."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing.connection import wait
from typing import NamedTuple

import numpy as np

from bertjax import UserError
from bertjax.data.sentences import split_sentences
from bertjax.data.sources import Document
from bertjax.data.tokenizers import Tokenizer

BLOCK = 1 << 20  # characters of a piece of work
PARAGRAPH = 1 << 20  # characters of the longest piece of a paragraph; part of FORMAT
SMALL = 4  # so many blocks are done without processes, which take longer to start
BATCH = 1 << 17  # characters a call of the tokenizer: it takes 100 bytes for each


class Block(NamedTuple):
    """A piece of work: paragraphs of parts of documents.

    `begins` says of each part whether a document begins with it.
    """

    parts: list[list[str]]
    begins: list[bool]
    characters: int


class Encoded(NamedTuple):
    """What became of a block.

    tokens: u16 or u32 [n]; lengths: i64 [s], tokens of each sentence;
    sentences: how many of them each part has; empty: sentences without a token, which
    are left out; characters: of the block.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    sentences: list[int]
    begins: list[bool]
    empty: int
    characters: int


def blocks(documents: Iterable[Document], characters: int = BLOCK) -> Iterator[Block]:
    """Cut documents into blocks of about `characters`, between paragraphs.

    >>> list(blocks([Document(["ab", "c"]), Document(["d"])], characters=2))
    [Block([['ab']], [True], 2), Block([['c'], ['d']], [False, True], 2)]
    """
    block = Block([], [], 0)
    for document in documents:
        first = True
        part: list[str] = []
        for paragraph in chain.from_iterable(map(pieces, document.paragraphs)):
            if not part:
                block.parts.append(part)
                block.begins.append(first)
                first = False
            part.append(paragraph)
            block = block._replace(characters=block.characters + len(paragraph))
            if block.characters >= characters:
                yield block
                block, part = Block([], [], 0), []
    if block.parts:
        yield block


def pieces(paragraph: str, longest: int = PARAGRAPH) -> Iterator[str]:
    """Cut a paragraph of extreme length, behind a full stop, a space, or anywhere.

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
    """Return the type of stored ids: u16 where they fit."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def encode_block(tokenizer: Tokenizer, block: Block) -> Encoded:
    """Split a block's paragraphs into sentences and these into ids.

    Raises UserError where the tokenizer gives an id that its vocabulary has not.
    """
    texts: list[str] = []
    owners: list[int] = []
    for number, part in enumerate(block.parts):
        for paragraph in part:
            found = split_sentences(paragraph)
            if tokenizer.joins_with_space:
                found = with_spaces(paragraph, found)
            texts += found
            owners += [number] * len(found)
    dtype = token_dtype(tokenizer.vocab_size)
    lengths: list[int] = []
    arrays: list[np.ndarray] = []
    for batch in _batches(texts):
        ids = tokenizer.encode_batch(batch)
        lengths += map(len, ids)
        flat = np.fromiter(chain.from_iterable(ids), np.int64)
        if len(flat) and not 0 <= flat.min() <= flat.max() < tokenizer.vocab_size:
            raise UserError(
                f"data.vocab: the tokenizer gave id {flat.max()}, but its vocabulary "
                f"has {tokenizer.vocab_size} pieces"
            )
        arrays.append(flat.astype(dtype))
    every = np.array(lengths, np.int64)
    kept = every > 0
    return Encoded(
        tokens=np.concatenate(arrays) if arrays else np.zeros(0, dtype),
        lengths=every[kept],
        sentences=np.bincount(
            np.array(owners, np.int64)[kept], minlength=len(block.parts)
        ).tolist(),
        begins=block.begins,
        empty=int(len(every) - kept.sum()),
        characters=block.characters,
    )


def with_spaces(paragraph: str, sentences: list[str]) -> list[str]:
    """Give sentences back the space before them, which byte BPE puts into its pieces.

    >>> with_spaces("One.  Two.", ["One.", "Two."])
    ['One.', ' Two.']
    """
    text = " ".join(paragraph.split())
    spaced, at = [], 0
    for sentence in sentences:
        at = text.index(sentence, at)
        spaced.append(" " + sentence if text[at - 1 : at] == " " else sentence)
        at += len(sentence)
    return spaced


def _batches(texts: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, workers: int
) -> Iterator[Encoded]:
    """Yield the encoded blocks in order; the number of workers changes nothing else.

    A short text is done in this process; else at most 2 `workers` + 1 blocks are under
    way at once.
    """
    work = blocks(documents)
    head = list(islice(work, SMALL + 1))
    if workers == 1 or len(head) <= SMALL:
        for block in chain(head, work):
            yield encode_block(tokenizer, block)
        return
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _begin, (tokenizer,)
    )
    try:
        under_way: deque[Future[Encoded]] = deque()
        for block in chain(head, work):
            under_way.append(pool.submit(_work, block))
            if len(under_way) > 2 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool as e:
        raise RuntimeError(
            "a worker of prepare was killed (out of memory?); "
            "nothing was left behind, the command can be repeated"
        ) from e
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_tokenizer: Tokenizer  # of a worker process


def _begin(tokenizer: Tokenizer) -> None:
    global _tokenizer
    _tokenizer = tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the work
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent was killed: a pool's worker waits for ever."""
    parent = multiprocessing.parent_process()
    with contextlib.suppress(OSError):
        wait([parent.sentinel])
    os._exit(1)


def _work(block: Block) -> Encoded:
    return encode_block(_tokenizer, block)
