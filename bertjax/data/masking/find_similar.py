# SPDX-License-Identifier: Apache-2.0
"""Find words' similar words: by word vectors of the training text, or in a thesaurus.

Cui et al. 2020 (MacBERT) take the word that the Synonyms toolkit finds by word2vec
(Mikolov et al. 2013, arXiv 1301.3781); their table and code are unpublished. Here the
words are those that masking chooses, read out of the token stores, so that a table
holds what can be looked up, and of each word only similar ones of as many pieces.
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
from bertjax.data.token_flags import BEGINS_WORD
from bertjax.data.tokenizers.vocab_files import read_lines

NEAREST = 5  # similar words of a word
LEAST = 0.4  # cosine of a similar word
MOST = 50_000  # words that vectors are learnt of, the commonest
RARE = 10  # a word that occurs less often has no vector
SETTINGS = dict(vector_size=100, window=5, negative=5, sg=1, epochs=5, seed=1)
# Cilin: a class such as Aa01A01 and what its words are: = synonyms, # related, @ alone.
_CILIN = re.compile(r"[A-Z][a-z]\d\d[A-Z]\d\d([=#@])")

Words = dict[str, list[str]]  # a word and its similar words, the most similar first


class Numbered(NamedTuple):
    """The words of a text, numbered by how often they occur, the commonest first.

    ids: the pieces of each. count: i64 [n], how often it occurs. text: i32 [m], the
    numbers of all words in order, -1 for what is none. ends: i64 [s], where the
    sentences end in it.
    """

    ids: list[tuple[int, ...]]
    count: np.ndarray
    text: np.ndarray
    ends: np.ndarray


def number_words(stores: Iterable[Any], tokenizer: Any) -> Numbered:
    """Number the words of token stores (tokens, sentences, and marks or None).

    A word begins where the store's marks, or the vocabulary, say so. What holds a
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
    """Return the commonest words as they are written, "" for what is none.

    A word has a letter, and the same pieces when it is read again.
    """
    ids = numbered.ids[:MOST]
    # Some tokenizers put a space between the characters of a Chinese word.
    texts = ["".join(tokenizer.decode(word).split()) for word in ids]
    again = ids_within_sentences(texts, tokenizer)
    return [
        text if same == word and any(map(str.isalpha, text)) else ""
        for text, word, same in zip(texts, ids, again, strict=True)
    ]


class _Sentences:
    """The sentences of a text for gensim, which goes through them again and again."""

    def __init__(self, numbered: Numbered, names: Sequence[str], progress: Any) -> None:
        self.numbered, self.names, self.progress = numbered, names, progress

    def __iter__(self) -> Iterator[list[str]]:
        text, names, start = self.numbered.text, self.names, 0
        for end in self.numbered.ends.tolist():
            numbers = text[start:end].tolist()
            yield [names[i] for i in numbers if 0 <= i < len(names)]
            if self.progress is not None:
                self.progress.add(end - start)
            start = end


def import_word2vec() -> Any:
    """Import gensim's word2vec. Raises UserError where gensim is missing."""
    return registry.import_extra("gensim.models.word2vec", "similar", "--similar")


def learn_vectors(numbered: Numbered, n: int, progress: Any = None) -> np.ndarray:
    """Learn word2vec's vectors (skip-gram) of the n commonest words, f32 [n, D].

    By gensim, in one thread: the same text gives the same vectors. progress: of all
    words, as many times as they are gone through. Raises UserError where gensim is
    missing, or no word occurs RARE times.
    """
    word2vec = import_word2vec()
    names = [str(i) for i in range(n)]
    sentences = _Sentences(numbered, names, progress)
    if progress is not None:  # one more time, to count the words
        progress.total = len(numbered.text) * (SETTINGS["epochs"] + 1)
    if not (numbered.count[:n] >= RARE).any():
        raise UserError(f"--similar: no word of data.train occurs {RARE} times")
    model = word2vec.Word2Vec(sentences, min_count=RARE, workers=1, **SETTINGS)
    vectors = np.zeros((n, SETTINGS["vector_size"]), np.float32)
    for name, at in model.wv.key_to_index.items():
        vectors[int(name)] = model.wv.vectors[at]
    return vectors


def nearest_words(
    vectors: np.ndarray, sizes: np.ndarray, usable: np.ndarray
) -> list[list[int]]:
    """Return of each vector f32 [n, D] the words whose vectors have the largest
    cosine, at most NEAREST and at least LEAST, the nearest first.

    sizes: i64 [n]; only words of the same size are similar. usable: bool [n]; what is
    not, or has the vector 0, is similar to nothing.
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


def similar_by_text(
    stores: Sequence[Any], tokenizer: Any, progress: Any = None
) -> Words:
    """Find similar words by the vectors of the words of token stores.

    progress: as `learn_vectors` has it. Raises UserError.
    """
    numbered = number_words(stores, tokenizer)
    texts = write_words(numbered, tokenizer)
    vectors = learn_vectors(numbered, len(texts), progress)
    sizes = np.array([len(ids) for ids in numbered.ids[: len(texts)]])
    near = nearest_words(vectors, sizes, np.array([bool(text) for text in texts]))
    return {
        text: [texts[i] for i in own]
        for text, own in zip(texts, near, strict=True)
        if own
    }


def read_synonyms(path: str, where: str) -> Words:
    """Read a thesaurus: UTF-8 text, also .gz, the synonyms of a group on each line.

    White space parts them. Of Tongyici Cilin's lines, which begin with a class, those
    with `=` count: its # are related and its @ alone. Of each word the others of its
    line are similar, of all of its lines. Raises UserError, which begins with `where`.
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
    """Leave out similar words that could not stand in for a word: those of another
    number of pieces, with unknown ones, or that the tokenizer takes for the same."""
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
    """Return the text of a table, as `similar_words.read_similar` has it.

    origin: where it comes from, for people; it stands behind the format.
    """
    lines = (" ".join([word, *own]) for word, own in words.items())
    return "\n".join([f"{HEADER}, {origin}", *lines]) + "\n"
