# SPDX-License-Identifier: Apache-2.0
import mmap
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_stores import store_of

from bertjax.data.sequences import chunks


def texts(longest=14):
    """Draw texts as lists of documents, which are lists of sentence lengths."""
    sizes = st.lists(st.integers(1, longest), min_size=1, max_size=9)
    return st.lists(sizes, min_size=1, max_size=30)


def step_by_step(ends, limit, i, stop):
    visited = []
    while i < stop:
        visited.append(i)
        i = next(j for j in range(i + 1, len(ends)) if ends[j] > limit[i])
    return visited, i


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=300),
    st.integers(6, 20),
    st.integers(0, 5),
)
def test_a_walk_is_that_of_the_definition(sizes, room, i):
    begin = np.cumsum([0, *sizes])
    ends = np.append(begin[1:], 10**9)
    stop = max(len(sizes) - 20, i)
    visited, after = chunks.walk(ends, begin[:stop] + room, i, stop)
    assert (visited.tolist(), after) == step_by_step(ends, begin + room, i, stop)


@pytest.mark.parametrize("size", [1, 50, 63])
def test_sentences_of_one_length(size):
    sentences = np.arange(40_001) * size
    text = SimpleNamespace(sentences=sentences, documents=np.array([0, 40_000]))
    [block] = chunks.sentence_blocks(text, 128, True)
    assert (np.diff(block.start) == 126 // size * size).all()


@settings(max_examples=60, deadline=None)
@given(texts(), st.integers(5, 20), st.booleans(), st.integers(1, 9))
def test_windows_change_nothing(corpus, length, cross, window):
    text = store_of(corpus)

    def told(size, sentences, target):
        return size * 10_000 + sentences * 100 + target

    def blocks():
        made = [
            chunks.document_blocks(text, length),
            chunks.sentence_blocks(text, length, cross),
            chunks.pair_blocks(text, length, 3, 0.5, told),
        ]
        for parts in made:
            for column in zip(*parts, strict=True):
                if column[0] is not None:
                    yield np.concatenate(column).tolist()

    whole = list(blocks())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "WINDOW", window)
        assert list(blocks()) == whole


@given(texts(), st.integers(3, 20))
def test_documents_are_cut_where_they_are_full(corpus, length):
    [block] = chunks.document_blocks(store_of(corpus), length)
    expected, at = [], 0
    for document in corpus:
        end = at + sum(document)
        while at < end:
            stop = min(at + length - 2, end)
            expected.append((at, stop, stop - at + 2))
            at = stop
    columns = block.start, block.stop, block.slots
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == expected


@given(texts(), st.integers(5, 20), st.booleans())
def test_blocks_know_their_documents(corpus, length, cross):
    text = store_of(corpus)
    edges = text.sentences[text.documents]
    [block] = chunks.sentence_blocks(text, length, cross)
    inside = (edges[block.document] <= block.start) & (
        block.start < edges[block.document + 1]
    )
    assert inside.all()
    [block] = chunks.pair_blocks(text, length, 0, 0.1, lambda c, m, t: c)
    assert (text.documents[block.document] <= block.start).all()
    assert (block.stop <= text.documents[block.document + 1]).all()


def test_pages_of_maps_are_found_and_private_maps_left_alone(tmp_path, monkeypatch):
    np.arange(5000).tofile(tmp_path / "a")
    for mode in ("r", "c"):
        array = np.memmap(tmp_path / "a", np.int64, mode)
        view = np.asarray(array)[7:]
        if mode == "c":
            array[9] = 5
        for advice in ("MADV_NORMAL", "MADV_RANDOM", "MADV_DONTNEED"):
            chunks.advise(view, advice, 0)
            chunks.advise(view, advice)  # small maps are left alone
        assert view.tolist()[3:] == list(range(10, 5000))
        assert view[2] == (9 if mode == "r" else 5)
    chunks.release(np.arange(3))
    chunks.advise(None, "MADV_RANDOM")
    unknown = SimpleNamespace(mmap=mmap.mmap, MADV_RANDOM=1_000_000)
    monkeypatch.setattr(chunks, "mmap", unknown)
    chunks.advise(view, "MADV_RANDOM", 0)  # not called for a private map
    shared = np.asarray(np.memmap(tmp_path / "a", np.int64, "r"))[7:]
    with pytest.raises((OSError, ValueError)):
        chunks.advise(shared, "MADV_RANDOM", 0)
