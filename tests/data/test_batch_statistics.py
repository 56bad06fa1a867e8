# SPDX-License-Identifier: Apache-2.0
"""What `show` counts and writes, for a batch with known counts."""

from types import SimpleNamespace

import numpy as np
import pytest
from host_half import make_half
from made_up import fake_tokenizer

from bertjax.data.batch_statistics import Statistics
from bertjax.data.batches import Inspected
from bertjax.data.mixture import Located
from bertjax.data.rendering import (
    decode,
    row_stages,
    show_row,
    stage_html,
    surface,
    to_html,
    to_text,
)
from bertjax.data.tokenizers.tokenizer import train_tokenizer

PIECES = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat ##ch <b> sat".split()  # noqa: SIM905
TOKENIZER = fake_tokenizer(
    10,
    pieces=PIECES,
    kind="wordpiece",
    word_starts=np.array([not p.startswith("##") for p in PIECES]),
)


def inspected(packed=False):
    """Return two rows, `the cat ##ch <b>` and `sat [UNK]`, with three selections."""
    ids = np.array([[2, 5, 6, 7, 8, 3], [2, 9, 1, 3, 0, 0]], np.int32)
    gathered = {
        "input_ids": ids,
        "attention_mask": (ids > 0).astype(np.int32),
        "token_type_ids": np.zeros_like(ids),
        "nsp_labels": np.array([1, 0], np.int32),
    }
    if packed:
        gathered["segment_ids"] = np.array([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0]])
        gathered["cls_weights"] = np.array([[1, 1], [1, 0]], np.float32)
        gathered["nsp_labels"] = np.array([[1, 1], [0, 0]], np.int32)
    batch = dict(gathered, input_ids=ids.copy())
    batch["input_ids"][0, 2] = 4  # cat -> [MASK]
    batch["input_ids"][0, 4] = 9  # <b> -> sat
    batch["mlm_positions"] = np.array([[2, 4], [1, 0]], np.int32)
    batch["mlm_ids"] = np.array([[6, 8], [9, 0]], np.int32)
    batch["mlm_weights"] = np.array([[1, 1], [1, 0]], np.float32)
    found = Located(np.array([1, 0]), np.array([5, 7]), np.zeros(2, np.uint64))
    drawn, truncated = np.array([1, 1, 2]), np.array([0, 3])
    return told(Inspected(found, gathered, batch, drawn, truncated, {}, None, None))


def told(seen):
    """Add the counts of the host half of a masked LM."""
    half = make_half("mlm", TOKENIZER, 6)
    predicted, origin = half.predicted(seen.batch), half.origin(seen.batch)
    counts = half.count(seen.gathered, seen.batch)
    return seen._replace(counts=counts, predicted=predicted, origin=origin)


def test_counts_by_hand():
    statistics = Statistics(TOKENIZER, ("en", "sw"))
    statistics.add(inspected(), "first")
    statistics.add(inspected(), "second")
    assert statistics.results() == {
        "rows": 4,
        "sequences": 4,
        "tokens": 20,
        "fill": pytest.approx(20 / 24),
        "segments_per_row": 1.0,
        "sequence_tokens": {"mean": 5.0, "min": 4, "median": 4, "p90": 6, "max": 6},
        "selected_rate": 6 / 20,
        "mask_rate": pytest.approx(1 / 3),
        "random_rate": pytest.approx(1 / 3),
        "keep_rate": pytest.approx(1 / 3),
        "special_selected": 0,
        "special_replacements": 0,
        "partial_words": 2,  # `cat` without `##ch`, in both batches
        "rows_without_predictions": 0,
        "unit_lengths": {"1": 4, "2": 2},
        "unknown_rate": 2 / 20,
        "truncated": 0.5,
        "pair_labels": {"0": 2, "1": 2},
        "components": {"en": 2, "sw": 2},
        "batch_sha256": ["first", "second"],
    }


def test_counts_of_packed_rows():
    statistics = Statistics(TOKENIZER, ("en", "sw"))
    statistics.add(inspected(packed=True), "x")
    results = statistics.results()
    assert results["segments_per_row"] == 1.5
    assert results["sequence_tokens"] == dict(
        mean=10 / 3, min=3, median=3, p90=4, max=4
    )
    assert results["pair_labels"] == {"0": 1, "1": 2}  # unused slots do not count


def test_marks_decide_where_words_begin():
    """In the marks `the cat` and `##ch <b>` are words, so each is selected in part."""
    seen = inspected()
    marks = np.zeros((2, 6), np.uint8)
    marks[0, [1, 3]] = marks[1, [1, 2]] = 1
    statistics = Statistics(TOKENIZER, ("en", "sw"))
    seen = told(seen._replace(gathered=seen.gathered | {"marks": marks}))
    statistics.add(seen, "x")
    assert statistics.results()["partial_words"] == 2


def test_a_row_without_types_is_of_one_part():
    seen = inspected()
    batch = {k: v for k, v in seen.batch.items() if k != "token_type_ids"}
    tokens = show_row(seen._replace(batch=batch), TOKENIZER, 0)
    assert [t.part for t in tokens] == [0] * len(tokens)


def test_the_stages_of_a_row():
    tokens = show_row(inspected(), TOKENIZER, 0)
    assert [t.fate for t in tokens] == ["", "", "masked", "", "replaced", ""]
    lines = [to_text(tokens, s, False) for s in ("gathered", "chosen", "corrupted")]
    assert lines == [
        "[CLS] the catch <b> [SEP]",
        "[CLS] the [cat]ch [<b>] [SEP]",
        "[CLS] the {[MASK]}ch ~sat [SEP]",
    ]
    (kept,) = (t for t in show_row(inspected(), TOKENIZER, 1) if t.fate)
    assert (kept.fate, kept.before) == ("kept", ("sat", False))
    coloured = to_text(tokens, "corrupted", True)
    assert "\033[31m[MASK]\033[0m" in coloured and "\033[35msat" in coloured


def test_the_two_sides_of_a_row():
    seen = inspected()
    target = np.array([[7, 8, 3], [6, 3, 0]], np.int32)
    batch = {
        "input_ids": np.array([[5, 4, 3], [4, 9, 3]], np.int32),
        "attention_mask": np.ones((2, 3), np.int32),
        "lm_ids": target,
        "decoder_input_ids": target,
        "decoder_attention_mask": (target > 0).astype(np.int32),
    }
    predicted = batch["input_ids"] == 4
    seen = seen._replace(batch=batch, predicted=predicted, origin=None)
    lines = [
        (stage, to_text(tokens, stage, False))
        for stage, tokens in row_stages(seen, TOKENIZER, 1).items()
    ]
    assert lines == [
        ("gathered", "[CLS] sat [UNK] [SEP]"),
        ("input", "[[MASK]] sat [SEP]"),
        ("target", "cat [SEP]"),
    ]
    statistics = Statistics(TOKENIZER, ("en", "sw"))
    statistics.add(seen, "first")
    assert statistics.results()["fill"] == 10 / 12  # slots of both sides


def test_a_page_escapes_what_it_shows():
    tokens = show_row(inspected(), TOKENIZER, 0)
    page = to_html(
        {"unit_lengths": {"1": 3}, "fill": 0.5},
        [("<row>", [(s, stage_html(tokens, s)) for s in ("chosen", "corrupted")])],
        "",
    )
    assert "<b>" not in page.replace("<b>&lt;row&gt;</b>", "")
    assert "&lt;b&gt;" in page
    assert "http" not in page  # the page loads nothing
    assert page.count("class='masked'") == 2  # chosen, corrupted


def test_control_characters_do_not_reach_a_terminal():
    tokenizer = SimpleNamespace(
        **{**vars(TOKENIZER), "pieces": [*PIECES[:9], "a\033[2J"]}
    )
    tokens = show_row(inspected(), tokenizer, 1)
    assert "\033" not in to_text(tokens, "gathered", False)


@pytest.mark.parametrize(
    "kind, piece, known",
    [
        ("unigram", "▁cat", ("cat", False)),
        ("unigram", "ch", ("ch", True)),
        ("byte_bpe", "Ġcat", ("cat", False)),
        ("byte_bpe", "Ã©", ("é", True)),
        ("byte_bpe", "Ã", (r"\xc3", True)),
        ("byte_bpe", "PFâĤ", (r"PF\xe2\x82", True)),
        ("byte_bpe", "ĠaâĤ", (r"a\xe2\x82", False)),
        ("byte_bpe", "龘", ("龘", True)),
        ("ids", "17", ("17", False)),
    ],
)
def test_surfaces(kind, piece, known):
    tokenizer = SimpleNamespace(kind=kind, pieces=["[MASK]", piece], special_ids=[0])
    assert surface(tokenizer, 1) == known
    assert surface(tokenizer, 0) == ("[MASK]", False)


def test_characters_in_several_pieces_are_written_whole():
    """Of scripts beside Latin, which byte BPE takes apart."""
    tokenizer = train_tokenizer(["in rome"], "byte_bpe", 261)
    text = "कल in 京😀"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)
    whole = [tokenizer.cls_id, *ids, tokenizer.sep_id]
    assert decode(tokenizer, np.array(whole)) == f"<s>{text} </s>"
    assert decode(tokenizer, np.array(ids[:1])) == r"\xe0"
