# SPDX-License-Identifier: Apache-2.0
"""Find similar words: by word vectors of the training text, or in a thesaurus.

Cui et al. 2020 (MacBERT) use the words that the Synonyms toolkit finds by word2vec
(Mikolov et al. 2013, arXiv 1301.3781); their table and code are unpublished. Here the
words are the units that masking chooses, read from the token stores, so that masking
can look up every word of a table. Only similar words with the same number of pieces are
stored.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertjax import UserError, registry
from bertjax.data.masking.similar_words import (
    HEADER,
    hash_words,
    ids_within_sentences,
    why_unfit,
)
from bertjax.data.progress import Progress
from bertjax.data.token_flags import BEGINS_WORD
from bertjax.data.tokenizers.vocab_files import read_lines

NEAREST = 5  # similar words per word
LEAST = 0.4  # smallest cosine of a similar word
MOST = 50_000  # the most frequent words; only these get vectors
RARE = 10  # a word that occurs less often has no vector
SETTINGS = dict(vector_size=100, window=5, negative=5, sg=1, epochs=5, seed=1)
# A class of Tongyici Cilin, such as Aa01A01, and the relation of its words: = synonyms,
# # related words, @ a word without synonyms.
_CILIN = re.compile(r"[A-Z][a-z]\d\d[A-Z]\d\d([=#@])")

Words = dict[str, list[str]]  # word -> its similar words, the most similar first


class Numbered(NamedTuple):
    """The words of a text, numbered by their frequency, the most frequent first.

    ids: the pieces of each word. count: i64 [n], how often each word occurs. text: i32
    [m], the numbers of all words in order, -1 for anything that is no word. ends: i64
    [s], where the sentences end in `text`.
    """

    ids: list[tuple[int, ...]]
    count: np.ndarray
    text: np.ndarray
    ends: np.ndarray


def number_words(stores: Iterable[Any], tokenizer: Any) -> Numbered:
    """Number the words of token stores (which have tokens, sentences, marks or None).

    A word begins where the store's marks, or else the vocabulary, say so. A unit with a
    special piece, such as the unknown one, is no word.

    Worked example, where 8 continues a word and 1 is unknown: sentences 5 8 6 and
    6 1 6 -> ids [(6,), (5, 8)], text 1 0 0 -1 0, ends 2 5.
    """
    special = np.zeros(tokenizer.vocab_size, bool)
    special[tokenizer.special_ids] = True
    codes, ends, examples = [], [], {}
    total = 0
    for store in stores:
        tokens = np.asarray(store.tokens)
        if store.marks is None:
            begins = np.asarray(tokenizer.word_starts, bool)[tokens]
        else:
            begins = (np.asarray(store.marks) & BEGINS_WORD) > 0
        begins[store.sentences[:-1]] = True
        first = np.flatnonzero(begins)
        size = np.diff(first, append=len(tokens))
        code = hash_words(tokens, first, size)
        known = np.add.reduceat(special[tokens], first) == 0
        ends.append(total + np.searchsorted(first, store.sentences[1:]))
        total += len(first)
        code[~known] = 0
        codes.append(code)
        for key, at in zip(*np.unique(code, return_index=True), strict=True):
            word = tokens[first[at] : first[at] + size[at]]
            examples.setdefault(int(key), tuple(map(int, word)))
    keys, number, count = np.unique(
        np.concatenate(codes), return_inverse=True, return_counts=True
    )
    count[keys == 0] = 0
    order = np.lexsort((keys, -count))
    order = order[count[order] > 0]
    place = np.full(len(keys), -1, np.int32)
    place[order] = np.arange(len(order))
    ids = [examples[int(key)] for key in keys[order]]
    return Numbered(ids, count[order], place[number], np.concatenate(ends))


def write_words(numbered: Numbered, tokenizer: Any) -> list[str]:
    """Return the most frequent words as text, "" for units that are not usable words.

    A usable word has a letter, and encoding its text returns the same pieces.
    """
    ids = numbered.ids[:MOST]
    # Some tokenizers decode a Chinese word with spaces between its characters.
    texts = ["".join(tokenizer.decode(word).split()) for word in ids]
    again = ids_within_sentences(texts, tokenizer)
    return [
        text if same == word and any(map(str.isalpha, text)) else ""
        for text, word, same in zip(texts, ids, again, strict=True)
    ]


class _Sentences:
    """The sentences of a text for gensim, which iterates over them several times."""

    def __init__(
        self, numbered: Numbered, names: Sequence[str], progress: Progress
    ) -> None:
        self.numbered, self.names, self.progress = numbered, names, progress

    def __iter__(self) -> Iterator[list[str]]:
        text, names, start = self.numbered.text, self.names, 0
        for end in self.numbered.ends.tolist():
            numbers = text[start:end].tolist()
            yield [names[i] for i in numbers if 0 <= i < len(names)]
            self.progress.add(end - start)
            start = end


def import_word2vec() -> Any:
    """Import gensim's word2vec. Raises UserError if gensim is missing."""
    return registry.import_extra("gensim.models.word2vec", "similar", "--similar")


def learn_vectors(numbered: Numbered, n: int) -> np.ndarray:
    """Train word2vec vectors (skip-gram) for the n most frequent words, f32 [n, D].

    gensim trains in one thread, so that the same text gives the same vectors. Raises
    UserError if gensim is missing, or if no word occurs RARE times.
    """
    word2vec = import_word2vec()
    names = [str(i) for i in range(n)]
    if not (numbered.count[:n] >= RARE).any():
        raise UserError(f"--similar: no word of data.train occurs {RARE} times")
    # gensim reads the text once more, to count the words
    total = len(numbered.text) * (SETTINGS["epochs"] + 1)
    with Progress("word2vec", total=total, unit="words") as progress:
        sentences = _Sentences(numbered, names, progress)
        model = word2vec.Word2Vec(sentences, min_count=RARE, workers=1, **SETTINGS)
    vectors = np.zeros((n, SETTINGS["vector_size"]), np.float32)
    for name, at in model.wv.key_to_index.items():
        vectors[int(name)] = model.wv.vectors[at]
    return vectors


def nearest_words(
    vectors: np.ndarray, sizes: np.ndarray, usable: np.ndarray
) -> list[list[int]]:
    """Return, for each vector f32 [n, D], the words with the largest cosines, at most
    NEAREST words with a cosine of at least LEAST, the nearest first.

    sizes: i64 [n]; only words of the same size are compared. usable: bool [n]; words
    that are not usable, or whose vector is 0, have no similar words and are none.
    """
    norm = np.linalg.norm(vectors, axis=1)
    usable = usable & (norm > 0)
    unit = vectors / np.maximum(norm, 1e-12)[:, None]
    near: list[list[int]] = [[] for _ in vectors]
    for size in np.unique(sizes[usable]).tolist():
        own = np.flatnonzero(usable & (sizes == size))
        for low in range(0, len(own), 1024):
            some = own[low : low + 1024]
            cosine = unit[some] @ unit[own].T
            cosine[np.arange(len(some)), low + np.arange(len(some))] = -1
            best = np.argsort(-cosine, axis=1, kind="stable")[:, :NEAREST]
            for i, word in enumerate(some):
                row = best[i][cosine[i, best[i]] >= LEAST]
                near[word] = own[row].tolist()
    return near


def similar_by_text(stores: Sequence[Any], tokenizer: Any) -> Words:
    """Find similar words by word vectors trained on the text of token stores.

    Raises UserError as `learn_vectors` does.
    """
    numbered = number_words(stores, tokenizer)
    texts = write_words(numbered, tokenizer)
    vectors = learn_vectors(numbered, len(texts))
    sizes = np.array([len(ids) for ids in numbered.ids[: len(texts)]])
    near = nearest_words(vectors, sizes, np.array([bool(text) for text in texts]))
    return {
        text: [texts[i] for i in own]
        for text, own in zip(texts, near, strict=True)
        if own
    }


def read_synonyms(path: str, where: str) -> Words:
    """Read a thesaurus: UTF-8 text, also .gz, one group of synonyms per line.

    White space separates the words. Lines of Tongyici Cilin begin with a class; only
    those with `=` are used, not related words (#) nor words alone (@). The similar
    words of a word are the other words on all of its lines. Raises UserError, which
    begins with `where`.
    """
    lines = read_lines(Path(path), where)
    listed: dict[str, dict[str, None]] = {}
    for line in lines:
        words = line.split()
        if words and (cilin := _CILIN.fullmatch(words[0])):
            words = words[1:] if cilin[1] == "=" else []
        for word in words:
            own = listed.setdefault(word, {})
            own |= {other: None for other in words if other != word}
    found = {word: list(own) for word, own in listed.items() if own}
    if not found:
        raise UserError(f"{where}: no line holds two synonyms")
    return found


def fitting_words(words: Mapping[str, Sequence[str]], tokenizer: Any) -> Words:
    """Drop similar words that cannot replace a word: those with a different number of
    pieces, with unknown pieces, or with the same pieces as the word."""
    texts = list(dict.fromkeys(w for word in words for w in (word, *words[word])))
    ids = dict(zip(texts, ids_within_sentences(texts, tokenizer), strict=True))
    special = set(map(int, tokenizer.special_ids))

    kept = {
        word: [w for w in own if not why_unfit(ids[word], ids[w], special)]
        for word, own in words.items()
        if ids[word] and special.isdisjoint(ids[word])
    }
    return {word: own for word, own in kept.items() if own}


def format_words(words: Mapping[str, Sequence[str]], origin: str) -> str:
    """Return the text of a table in the format that `similar_words.read_similar` reads.

    origin: where the table comes from, for people; written in the header line.
    """
    lines = (" ".join([word, *own]) for word, own in words.items())
    return "\n".join([f"{HEADER}, {origin}", *lines]) + "\n"
