# SPDX-License-Identifier: Apache-2.0
"""Generation from left to right, against all possible texts: V = 5, T = 4."""

import jax
import numpy as np
import pytest
from toys import END, TOY, T, V, draw_table, every_text, prompts

from bertjax.generation.beam import Beams, beam_search
from bertjax.generation.decode import Ends, generate
from bertjax.generation.pick import Pick, keep_likely, penalize

ROWS = [[1, 2], [3, 4, 1], [2, 2], [4, 3, 2, 1]]
ENDS = Ends((END,), pad_id=1)
TABLE = draw_table()


def texts(written):
    ids, lengths = np.asarray(written.ids), np.asarray(written.lengths)
    return [tuple(row[:n].tolist()) for row, n in zip(ids, lengths, strict=True)]


def test_greedy_takes_the_likeliest_token_each_time():
    written = generate(TOY, TABLE, prompts(ROWS), max_new_tokens=T, ends=ENDS)
    for row, text, score in zip(ROWS, texts(written), written.scores, strict=True):
        want = []
        while len(want) < T and END not in want:
            before, last = (*row, *want)[-2:]
            want.append(int(TABLE[len(want), before, last].argmax()))
        assert text == tuple(want)
        assert score == pytest.approx(every_text(TABLE, row)[text], rel=1e-5)
    for row, n in zip(np.asarray(written.ids), written.lengths, strict=True):
        assert (row[n:] == ENDS.pad_id).all()


@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_beams_that_hold_all_texts_find_the_best(penalty):
    beams = Beams(V**T, penalty, early_stopping="never")
    written = beam_search(
        TOY, TABLE, prompts(ROWS), max_new_tokens=T, beams=beams, ends=ENDS, samples=3
    )
    found, scores = texts(written), np.asarray(written.scores)
    for i, row in enumerate(ROWS):
        every = every_text(TABLE, row)
        best = sorted(every, key=lambda t: every[t] / len(t) ** penalty, reverse=True)
        assert found[3 * i : 3 * i + 3] == best[:3]
        wanted = [every[text] for text in best[:3]]
        np.testing.assert_allclose(scores[3 * i : 3 * i + 3], wanted, rtol=1e-5)


def plain_beams(table, prompt, k, penalty, early):
    """Return the texts that transformers' rules find for one row, with plain loops."""
    every, open_texts, done = every_text(table, prompt), [((), 0.0)], []
    for n in range(1, T + 1):
        step = []
        for text, score in open_texts:
            before, last = (*prompt, *text)[-2:]
            logits = table[len(text), before, last].astype(np.float64)
            likely = logits - np.log(np.exp(logits).sum())
            step += [((*text, i), score + likely[i]) for i in range(V)]
        step = sorted(step, key=lambda one: -one[1])[: 2 * k]
        for text, score in step[:k]:
            if text[-1] == END or n == T:
                done.append((text, score / n**penalty))
        done = sorted(done, key=lambda one: -one[1])[:k]
        open_texts = [one for one in step if one[0][-1] != END][:k]
        length = T if early == "never" and penalty > 0 else n
        best = open_texts[0][1] / length**penalty
        if len(done) == k and (early == "true" or best <= done[-1][1]):
            break
    return [(text, every[text]) for text, _ in done]


@pytest.mark.parametrize(
    ("k", "penalty", "early"),
    [(2, 1.0, "false"), (3, 0.0, "never"), (3, 2.0, "never"), (2, -1.0, "true")],
)
def test_beams_follow_the_rules(k, penalty, early):
    """Each row of a batch has the texts of the rules for it alone."""
    rows = [[a, b] for a in range(1, V) for b in range(1, V)]
    for seed in range(2):
        table = draw_table(seed, sharp=1.5)
        beams = Beams(k, penalty, early)
        written = beam_search(
            TOY,
            table,
            prompts(rows),
            max_new_tokens=T,
            beams=beams,
            ends=ENDS,
            samples=k,
        )
        found, scores = texts(written), np.asarray(written.scores)
        for i, row in enumerate(rows):
            want = plain_beams(table, row, k, penalty, early)
            part = slice(k * i, k * i + len(want))
            assert found[part] == [text for text, _ in want]
            np.testing.assert_allclose(scores[part], [s for _, s in want], rtol=1e-4)


def test_one_beam_is_greedy_and_a_forced_end_is_written():
    one = dict(max_new_tokens=T, ends=ENDS)
    greedy = generate(TOY, TABLE, prompts(ROWS), **one)
    beam = beam_search(TOY, TABLE, prompts(ROWS), beams=Beams(1), **one)
    assert texts(greedy) == texts(beam)
    forced = dict(max_new_tokens=3, ends=Ends((END,), 1, forced=END))
    for written in (
        generate(TOY, TABLE, prompts(ROWS), **forced),
        beam_search(TOY, TABLE, prompts(ROWS), beams=Beams(2), **forced),
    ):
        assert all(text[-1] == END for text in texts(written))
        # The end is the only token allowed at the last position, so its ln p is 0.
        last = np.asarray(written.ids)[..., 2] == END
        assert last.any() and not np.asarray(written.log_probs)[..., 2][last].any()


def chi_square(found, wanted):
    """Return the chi-square statistic divided by its 0.9999 quantile; < 1 passes."""
    stats = pytest.importorskip("scipy.stats")
    keys = [key for key in wanted if wanted[key] >= 5]
    rest = sum(found.values()) - sum(found.get(key, 0) for key in keys)
    expected = np.array([*(wanted[k] for k in keys), sum(wanted.values())])
    expected[-1] -= expected[:-1].sum()
    counts = np.array([*(found.get(key, 0) for key in keys), rest])
    kept = expected > 1
    statistic = (np.square(counts - expected)[kept] / expected[kept]).sum()
    return statistic / stats.chi2.ppf(0.9999, kept.sum() - 1)


@pytest.mark.parametrize(
    "pick", [Pick(1.0), Pick(0.7, top_k=3), Pick(1.0, top_p=0.8)], ids=str
)
def test_samples_have_the_probabilities_of_the_model(pick):
    n, rows = 4000, [[1, 2], [3, 4]]
    written = generate(
        TOY, TABLE, prompts(rows), max_new_tokens=2, pick=pick, ends=ENDS, samples=n
    )
    found = texts(written)
    for i, row in enumerate(rows):
        wanted: dict = {}
        before, last = row[-2:]
        first = _probabilities(pick, TABLE[0, before, last])
        for a, p in enumerate(first):
            if a == END:
                wanted[(a,)] = p * n
                continue
            second = _probabilities(pick, TABLE[1, last, a])
            wanted |= {(a, b): p * q * n for b, q in enumerate(second)}
        part = found[n * i : n * i + n]
        counts = {text: part.count(text) for text in set(part)}
        assert all(wanted[text] > 0 for text in counts)
        assert chi_square(counts, wanted) < 1


def _probabilities(pick, logits):
    logits = logits.astype(np.float64) / pick.temperature
    if pick.top_k:
        logits = np.where(logits < np.sort(logits)[-pick.top_k], -np.inf, logits)
    likely = np.exp(logits - logits.max())
    likely /= likely.sum()
    order = np.argsort(-likely)
    before = np.cumsum(likely[order]) - likely[order]
    likely[order[before >= pick.top_p]] = 0
    return likely / likely.sum()


def test_samples_depend_on_seed_row_and_sample_alone():
    pick = Pick(1.0, top_p=0.95)

    def draw(rows, numbers, seed=3, samples=2, width=0):
        batch = prompts(rows, width)
        how = dict(max_new_tokens=T, pick=pick, ends=ENDS, seed=seed, samples=samples)
        return texts(generate(TOY, TABLE, batch, rows=np.array(numbers), **how))

    together = draw(ROWS, [0, 1, 2, 3])
    for i, row in enumerate(ROWS):
        assert draw([row], [i], width=9) == together[2 * i : 2 * i + 2]
    assert draw(ROWS, [0, 1, 2, 3], seed=4) != together
    same = [ROWS[3]] * 4
    assert draw(same, [0, 1, 2, 3]) != draw(same, [0] * 4)


def test_filters_and_penalty_by_hand():
    logits = np.log(np.array([[0.15, 0.5, 0.05, 0.3]], np.float32))
    kept = np.isfinite(np.asarray(keep_likely(logits, top_p=0.7)))
    assert kept.tolist() == [[False, True, False, True]]
    kept = np.isfinite(np.asarray(keep_likely(logits, top_k=3)))
    assert kept.tolist() == [[True, True, False, True]]
    kept = np.isfinite(np.asarray(keep_likely(logits, top_p=0.0)))
    assert kept.tolist() == [[False, True, False, False]]
    scores = np.array([[2.0, -1.0, 3.0]], np.float32)
    less = penalize(scores, np.array([[True, True, False]]), 2.0)
    assert np.asarray(less).tolist() == [[1.0, -2.0, 3.0]]


def test_what_has_been_there_becomes_rarer():
    """The penalty applies to tokens of the prompt and of the text; the score is the
    model's own ln p."""
    strong = generate(
        TOY,
        TABLE,
        prompts(ROWS),
        max_new_tokens=3,
        pick=Pick(repetition_penalty=1000.0),
        ends=Ends((), 1),
    )
    for row, text, score in zip(ROWS, texts(strong), strong.scores, strict=True):
        seen, want, total = {*row}, [], 0.0
        for n in range(3):
            logits = TABLE[n, (*row, *want)[-2], (*row, *want)[-1]].astype(np.float64)
            less = np.where(logits < 0, logits * 1000, logits / 1000)
            mark = np.isin(np.arange(V), [*seen])
            want.append(int(np.where(mark, less, logits).argmax()))
            total += logits[want[-1]] - np.log(np.exp(logits).sum())
            seen.add(want[-1])
        assert text == tuple(want)
        assert score == pytest.approx(total, rel=1e-5)


def test_nothing_is_computed_behind_the_last_end():
    """The loop stops when the last row has ended."""
    calls = []

    def extend(table, cache, ids):
        jax.debug.callback(lambda: calls.append(1))
        return TOY.extend(table, cache, ids)

    table = TABLE.copy()
    table[..., END] = 50.0
    counting = TOY._replace(extend=extend)
    written = generate(counting, table, prompts(ROWS), max_new_tokens=T, ends=ENDS)
    jax.block_until_ready(written)
    jax.effects_barrier()
    assert not calls and np.asarray(written.lengths).tolist() == [1] * 4
