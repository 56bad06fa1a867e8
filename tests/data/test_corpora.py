# SPDX-License-Identifier: Apache-2.0
"""Any corpus, from its bytes to batches: nothing crashes, is lost or is invented."""

import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from host_half import make_half
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from odd_corpora import Corpus, integers, texts

from bertjax import UserError
from bertjax.data import counter_rng
from bertjax.data.batches import Batches, batch_sha256
from bertjax.data.masking.presets import PRESETS
from bertjax.data.masking.similar_words import read_similar
from bertjax.data.masking.vocab_tables import make_tables
from bertjax.data.mixture import make_mixture
from bertjax.data.sequences.make_plan import make_plan
from bertjax.data.sequences.plan import Plan
from bertjax.data.token_store.prepare_data import prepare_data
from bertjax.data.token_store.store import Store
from bertjax.data.tokenizers.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

PLANS = [
    ("full_sentences", None), ("doc_sentences", None), ("sentence_starts", None),
    ("document", None), ("pairs", None), ("pairs", "nsp"), ("pairs", "sop"),
]  # fmt: skip
B = 8  # rows of a batch


class Choice(NamedTuple):
    """A way to create batches from a corpus."""

    plan: tuple[str, str | None]
    length: int
    packed: bool
    max_segments: int | None
    preset: str
    unit: str | None
    step: int
    hosts: int


choices = st.builds(
    Choice,
    st.sampled_from(PLANS),
    st.sampled_from([5, 8, 17, 40]),
    st.booleans(),
    st.sampled_from([None, 1, 3]),
    st.sampled_from(sorted(PRESETS)),
    st.sampled_from([None, None, "token", "word", "ngram", "span"]),
    st.integers(0, 10**6),
    st.sampled_from([1, 2, 4, 8]),
)


# The vocabularies


class Vocabulary(NamedTuple):
    """A tokenizer, its value of data.vocab, and the file of its similar words."""

    tokenizer: Tokenizer
    value: str
    similar: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return an empty directory, and skip waits for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield tmp_path_factory.mktemp("corpora")


@pytest.fixture(scope="module")
def vocabularies(place: Path) -> dict[str, Vocabulary]:
    train_tokenizer(
        ["the cats sat on the cat. " * 9], "byte_bpe", 280, None, place / "b"
    )
    letters = "abcdehnost3mr.。!?…我来到한국シß"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", *letters]
    pieces += [f"##{letter}" for letter in letters]
    (place / "vocab.txt").write_text("\n".join(dict.fromkeys(pieces)), "utf-8")
    values = {"byte_bpe": f"{place}/b", "wordpiece": f"{place}/vocab.txt"}
    values |= {"ids": "ids:20"}
    found = {}
    for kind, value in values.items():
        similar = place / f"{kind}.similar"
        similar.write_text("3 4 5\n7 8" if kind == "ids" else "the cat sat\ncat the on")
        found[kind] = Vocabulary(load_tokenizer(value), value, similar)
    return found


# Reversing a batch


def undo(
    rows: dict[str, np.ndarray], tokenizer: Tokenizer, pairs: bool
) -> list[list[tuple[tuple[int, ...], ...]]]:
    """Return the parts of each sequence of each row, and check their special tokens."""
    ids, real = rows["input_ids"], rows["attention_mask"]
    assert (np.diff(real, axis=1) <= 0).all() and set(real.flat) <= {0, 1}
    assert (ids[real == 0] == tokenizer.pad_id).all() and real[:, 0].all()
    segments = rows.get("segment_ids", real)
    assert ((segments > 0) == (real > 0)).all()
    types = rows["token_type_ids"]
    assert not types[real == 0].any() and (pairs or not types.any())
    found = []
    for r, row in enumerate(ids):
        sequences = []
        count = int(segments[r].max())
        for nth in range(1, count + 1):
            (at,) = np.nonzero(segments[r] == nth)
            assert (np.diff(at) == 1).all()
            inner = row[at].tolist()
            assert inner.pop(0) == tokenizer.cls_id and inner.pop() == tokenizer.sep_id
            split = [
                tuple(group)
                for is_end, group in itertools.groupby(
                    inner, lambda i: i == tokenizer.sep_id
                )
                if not is_end
            ]
            assert inner.count(tokenizer.sep_id) == len(split) - 1
            if pairs:
                assert types[r, at].tolist() == [0] * (len(split[0]) + 2) + [
                    1 for part in split[1:] for _ in (*part, 0)
                ]
            if "segment_ids" in rows:
                assert (rows["position_ids"][r, at] == np.arange(len(at))).all()
                assert rows["cls_positions"][r, nth - 1] == at[0]
            sequences.append(tuple(split))
        if "segment_ids" in rows:
            used = rows["cls_weights"][r]
            assert (used == (np.arange(len(used)) < count)).all()
        found.append(sequences)
    return found


def check_rows(
    plan: Plan, store: Store, tokenizer: Tokenizer, other: Plan | None
) -> None:
    """Rows of a plan hold each token of the text once; pairs hold only text.

    Those of sentence_starts repeat a sentence that was cut.

    `other` is the plan without packing, or None if `plan` is unpacked or makes pairs.
    """
    ids = np.arange(plan.n)
    keys = counter_rng.fold(5, ids)
    rows = plan.gather(ids, keys, tokenizer)
    pairs = plan.kind == "pairs"
    found = undo(rows, tokenizer, pairs)
    sequences = [sequence for row in found for sequence in row]
    ends = store.sentences[store.documents].tolist()
    tokens = store.tokens.tolist()
    documents = [tokens[a:b] for a, b in itertools.pairwise(ends)]
    if not pairs and other is None:
        parts = [part for sequence in sequences for part in sequence]
        if plan.kind == "sentence_starts":  # without what the next row begins with
            own = np.diff(plan.starts, append=len(tokens))
            parts = [part[:n] for part, n in zip(parts, own, strict=True)]
        assert list(itertools.chain.from_iterable(parts)) == tokens
        # Each part is in one document.
        assert set(ends) <= {0, *itertools.accumulate(map(len, parts))}
        if plan.kind != "full_sentences":
            assert all(len(sequence) == 1 for sequence in sequences)
    elif not pairs:
        alone = other.gather(np.arange(other.n), np.arange(other.n), tokenizer)
        unpacked = itertools.chain.from_iterable(undo(alone, tokenizer, False))
        assert Counter(sequences) == Counter(unpacked)
    else:
        check_pairs(plan, found, rows, plan.truncated(ids, keys), documents)


def check_pairs(
    plan: Plan,
    found: list[list[tuple[tuple[int, ...], ...]]],
    rows: dict[str, np.ndarray],
    cut: np.ndarray,
    documents: list[list[int]],
) -> None:
    """Both segments are text, and their label is right."""
    text = "\0".join("".join(map(chr, document)) for document in documents)
    labels = rows.get(f"{plan.pair_rule}_labels")
    for r, row in enumerate(found):
        for nth, sequence in enumerate(row):
            a, b = ("".join(map(chr, part)) for part in (*sequence, ())[:2])
            assert len(sequence) < 3 and a in text and b in text
            assert b or plan.pair_rule is None
            label = 0 if labels is None else np.atleast_1d(labels[r])[nth]
            if not cut[r] and label == 0:
                assert a + b in text
            elif not cut[r] and plan.pair_rule == "sop":
                assert b + a in text
    if plan.pair_rule != "nsp":
        held = sum(len(p) for row in found for sequence in row for p in sequence)
        skipped = plan.skipped.get("tokens in chunks of one sentence", 0)
        assert held + cut.sum() + skipped == sum(map(len, documents))


def check_masks(
    rows: dict[str, np.ndarray], batch: dict[str, np.ndarray], tokenizer: Tokenizer
) -> None:
    """The predicted ids are the original ones; special tokens are left alone."""
    used, at = batch["mlm_weights"] > 0, batch["mlm_positions"]
    assert set(batch["mlm_weights"].flat) <= {0.0, 1.0}
    assert (used[:, :-1] >= used[:, 1:]).all()
    assert (np.diff(at, axis=1)[used[:, 1:]] > 0).all()
    assert not at[~used].any() and not batch["mlm_ids"][~used].any()
    r, _ = np.nonzero(used)
    before, after = rows["input_ids"][r, at[used]], batch["input_ids"][r, at[used]]
    assert (before == batch["mlm_ids"][used]).all()
    assert not np.isin(before, tokenizer.special_ids).any()
    drawn = after[after != tokenizer.mask_id]
    assert not np.isin(drawn, tokenizer.special_ids).any()
    rest = np.ones(rows["input_ids"].shape, bool)
    rest[r, at[used]] = False
    assert (rows["input_ids"] == batch["input_ids"])[rest].all()


# From bytes to batches


def check_store(corpus: Corpus, store: Store, tokenizer: Tokenizer) -> None:
    """The store's documents are those of the corpus, token for token."""
    wanted = []
    for document in corpus.documents:
        lines = [" ".join(line.split()) for line in document]
        ids = list(itertools.chain.from_iterable(tokenizer.encode_batch(lines)))
        if ids:
            wanted.append("".join(lines) if tokenizer.kind == "byte_bpe" else ids)
    assert store.meta["documents"] == len(store.documents) - 1 == len(wanted)
    assert (np.diff(store.sentences) > 0).all() and (np.diff(store.documents) > 0).all()
    assert not np.isin(
        store.tokens, np.setdiff1d(tokenizer.special_ids, [tokenizer.unk_id])
    ).any()
    ends = store.sentences[store.documents]
    for (a, b), text in zip(itertools.pairwise(ends), wanted, strict=True):
        found = store.tokens[a:b].tolist()
        if tokenizer.kind == "byte_bpe":  # pieces depend on where sentences end
            found = tokenizer.engine.decode(found)
        assert found == text


def check_choice(choice: Choice, store: Store, vocabulary: Vocabulary) -> None:
    """Make and check a plan of the store, its rows and some batches."""
    tokenizer = vocabulary.tokenizer
    kind, rule = choice.plan
    how = {"length": choice.length, "seed": 7, "pair_rule": rule}
    try:
        plan = make_plan(
            store, kind, **how, packed=choice.packed, max_segments=choice.max_segments
        )
    except UserError as error:
        # No chunk has two sentences.
        assert rule == "sop" and "two sentences" in str(error)
        return
    apart = choice.packed and kind != "pairs"
    other = make_plan(store, kind, **how) if apart else None
    check_rows(plan, store, tokenizer, other)
    similar = read_similar(vocabulary.similar, tokenizer)
    tables = make_tables(tokenizer, store.counts, similar)
    needs, keys = frozenset({"mlm", rule} - {None}), dict(masking=choice.preset)
    keys["mask_unit"] = choice.unit
    try:
        features = make_half(needs, tokenizer, choice.length, tables, **keys)
    except UserError as error:
        assert "does not go with" in str(error)
        return
    mixture = make_mixture({"train": plan.n})
    batches = Batches((plan,), mixture, features, tokenizer, B, 11)
    try:
        seen = batches.inspect(choice.step)
    except UserError as error:
        # All tokens are unknown, so that there are no counts of rare tokens.
        assert choice.preset == "distilbert" and "counts" in str(error)
        assert not store.counts[tokenizer.replacement_ids].any()
        return
    undo(seen.gathered, tokenizer, kind == "pairs")
    check_masks(seen.gathered, seen.batch, tokenizer)
    whole = batches.batch(choice.step)
    assert batch_sha256(whole) == batch_sha256(seen.batch)
    for host in range(choice.hosts):
        rows = slice(host, None, choice.hosts)
        part = batches.batch(choice.step, rows)
        assert all((part[name] == whole[name][rows]).all() for name in whole)


def check_corpus(
    corpus: Corpus, vocabulary: Vocabulary, chosen: list[Choice], place: Path
) -> None:
    """Prepare a corpus and check everything that is created from it."""
    path = place / corpus.name
    path.write_bytes(corpus.data)
    shutil.rmtree(place / "cache", ignore_errors=True)
    lines = [line for document in corpus.documents for line in document]
    try:
        prepared = prepare_data(
            train=str(path),
            valid="",
            vocab=vocabulary.value,
            tokenizer_kind="",
            vocab_size=0,
            lower_case=None,
            cache=f"{place}/cache",
            workers=1,
            say=lambda line: None,
        )
    except UserError as error:
        # A drawn text may begin like such a file.
        if not any(kind in str(error) for kind in ("UTF-16", "compressed text")):
            assert not any(vocabulary.tokenizer.encode_batch(lines)), error
        assert corpus.name in str(error)
        return
    store = prepared.parts["train"]
    check_store(corpus, store, vocabulary.tokenizer)
    for choice in chosen:
        check_choice(choice, store, vocabulary)


def of_examples(number: int) -> Callable[..., None]:
    """Return the test with this number of corpora."""

    @settings(
        max_examples=number,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(
        st.one_of(
            st.tuples(texts, st.sampled_from(["wordpiece", "byte_bpe"])),
            st.tuples(integers, st.just("ids")),
        ),
        st.lists(choices, min_size=2, max_size=3),
    )
    def test(place, vocabularies, drawn, chosen):
        corpus, kind = drawn
        check_corpus(corpus, vocabularies[kind], chosen, place)

    return test


test_any_corpus = of_examples(60)
test_ten_thousand_corpora = pytest.mark.slow(of_examples(10_000))
