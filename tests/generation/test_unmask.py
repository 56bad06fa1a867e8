# SPDX-License-Identifier: Apache-2.0
"""Filling blanks in any order, against plain loops, with a model that is a table."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_decode import chi_square
from toys import recomputing_decoder

from bertjax import UserError
from bertjax.generation import blanks
from bertjax.generation.decode import generate
from bertjax.generation.options import Options, check_options
from bertjax.generation.pick import Pick
from bertjax.generation.unmask import Order, unmask
from bertjax.models import encoder, heads
from bertjax.models.config import EncoderConfig

L, V, MASK = 8, 6, 5
TABLE = np.random.RandomState(0).randn(L, L, V, V).astype(np.float32) * 2
TABLE[..., MASK] = -1e9  # no blank becomes [MASK]


def fill(table, batch):
    """Return the logits of each blank: a sum over all tokens of the row."""
    at = batch["mlm_positions"]
    rows = table[at[:, :, None], jnp.arange(L), batch["input_ids"][:, None, :]]
    return rows.sum(axis=2)


ROWS = [
    [1, MASK, MASK, 2, MASK, 3, MASK, MASK],
    [MASK, 4, 4, 2, 1, MASK, 0, 0],
    [MASK] * 8,
]


def make_batch(rows=ROWS, slots=8, block=None):
    ids = np.array(rows, np.int32)
    at = np.zeros((len(ids), slots), np.int32)
    free, blocks = np.zeros(at.shape, bool), np.zeros(at.shape, np.int32)
    for i, row in enumerate(ids):
        own = np.flatnonzero(row == MASK)
        at[i, : len(own)], free[i, : len(own)] = own, True
        blocks[i, : len(own)] = np.arange(len(own)) // (block or 99)
    number = np.arange(len(ids), dtype=np.int32)
    batch = {"input_ids": ids, "mlm_positions": at, "free": free, "blocks": blocks}
    return batch | {"rows": number, "samples": 0 * number}


def run(order, rows=ROWS, block=None, pick=None, seed=0):
    done = unmask(
        fill,
        TABLE,
        make_batch(rows, block=block),
        order=order,
        pick=pick or Pick(),
        seed=seed,
    )
    return jax.tree.map(np.asarray, done)


def by_hand(row, choose, steps=None):
    """Fill a row; choose(blanks, their ln p of all tokens) -> indices to fill now."""
    ids, score, calls = np.array(row), 0.0, 0
    while (ids == MASK).any():
        at = np.flatnonzero(ids == MASK)
        logits = np.stack([TABLE[i, np.arange(L), ids].sum(0) for i in at])
        logits = logits.astype(np.float64)
        likely = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        for k in choose(at, likely):
            ids[at[k]] = likely[k].argmax()
            score += likely[k].max()
        calls += 1
    return ids.tolist(), score, calls


def entropies(likely):
    return -(np.exp(likely) * np.maximum(likely, -1e6)).sum(1)


ONE = {
    "left": lambda at, likely: [0],
    "confidence": lambda at, likely: [likely.max(1).argmax()],
    "entropy": lambda at, likely: [entropies(likely).argmin()],
}


@pytest.mark.parametrize("name", ONE)
def test_one_token_a_call_is_what_is_done_by_hand(name):
    done = run(Order(name))
    for i, row in enumerate(ROWS):
        ids, score, calls = by_hand(row, ONE[name])
        assert done.ids[i].tolist() == ids
        assert done.scores[i] == pytest.approx(score, rel=1e-4)
        assert done.calls[i] == calls == row.count(MASK)


def test_gamma_bounds_what_a_call_leaves_open():
    """gamma=0 fills one token per call."""
    for gamma in (0.0, 0.5, 2.0):

        def choose(at, likely, gamma=gamma):
            h = entropies(likely)
            order = np.argsort(h, kind="stable")
            kept = [k for n, k in enumerate(order) if h[order[:n]].sum() < gamma]
            return kept or order[:1]

        done = run(Order("entropy", gamma=gamma))
        wanted = [by_hand(row, choose) for row in ROWS]
        assert done.ids.tolist() == [ids for ids, _, _ in wanted]
        assert done.calls.tolist() == [calls for _, _, calls in wanted]
        if not gamma:
            assert done.calls.tolist() == [row.count(MASK) for row in ROWS]
    assert max(done.calls) < 8


@pytest.mark.parametrize("steps", [1, 3, 100])
def test_steps_are_calls(steps):
    done = run(Order("confidence", steps=steps))
    for row, ids, calls in zip(ROWS, done.ids, done.calls, strict=True):
        assert calls == min(steps, row.count(MASK)) and MASK not in ids
    if steps == 1:  # all at once: each as if it were the only blank
        for i, row in enumerate(ROWS):
            assert done.ids[i].tolist() == by_hand(row, lambda at, p: range(len(at)))[0]


def test_fixed_tokens_stay_and_rows_do_not_act_on_each_other():
    pick = Pick(1.0)
    for order in (Order("random"), Order("confidence", steps=16, remask=0.5)):
        done = run(order, pick=pick, seed=7)
        for i, row in enumerate(ROWS):
            fixed = np.array(row) != MASK
            assert (done.ids[i][fixed] == np.array(row)[fixed]).all()
            assert MASK not in done.ids[i]
            own = make_batch([row]) | {"rows": np.array([i], np.int32)}
            alone = unmask(fill, TABLE, own, order=order, pick=pick, seed=7)
            assert np.asarray(alone.ids)[0].tolist() == done.ids[i].tolist()


def test_blocks_are_filled_one_after_the_other():
    done = run(Order("confidence"), block=2)
    for i, row in enumerate(ROWS):
        blanks = np.flatnonzero(np.array(row) == MASK)

        def choose(at, likely, blanks=blanks):
            filled = len(blanks) - len(at)
            return [likely[: 2 - filled % 2].max(1).argmax()]

        assert done.ids[i].tolist() == by_hand(row, choose)[0]


def test_tokens_that_are_taken_back_cost_calls_and_are_filled_again():
    rows = [[MASK] * 8] * 16
    plain = run(Order("random", steps=8), rows, pick=Pick(1.0))
    again = run(Order("random", steps=8, remask=1.0), rows, pick=Pick(1.0))
    assert (plain.calls == 8).all() and (again.calls == 8).all()
    assert (again.ids != MASK).all() and (again.ids != plain.ids).any()
    more = run(Order("random", steps=20, remask=0.3), rows, pick=Pick(1.0))
    assert ((more.calls > 16) & (more.calls <= 20)).all() and (more.ids != MASK).all()


def test_drawn_texts_have_the_probabilities_of_a_random_order():
    """With two blanks, one per call, it is the mean probability over both orders."""
    row, n = [1, 2, MASK, 3, 0, MASK, 4, 1], 3000
    done = run(Order("random"), [row] * n, pick=Pick(1.0))
    found: dict = {}
    for ids in done.ids:
        key = int(ids[2]), int(ids[5])
        found[key] = found.get(key, 0) + 1

    def likely(ids, at):
        logits = TABLE[at, np.arange(L), ids].sum(0).astype(np.float64)
        return np.exp(logits) / np.exp(logits).sum()

    wanted: dict = {}
    for first, second in ((2, 5), (5, 2)):
        for a, b in itertools.product(range(MASK), repeat=2):
            ids = np.array(row)
            p = likely(ids, first)[a]
            ids[first] = a
            key = (a, b) if first == 2 else (b, a)
            wanted[key] = wanted.get(key, 0) + n / 2 * p * likely(ids, second)[b]
    assert chi_square(found, wanted) < 1


class Letters:
    """A tokenizer of single letters."""

    pad_id, cls_id, sep_id, mask_id, vocab_size = 0, 1, 2, 3, 12
    special_ids = np.arange(4, dtype=np.int32)

    def encode_with_masks(self, text):
        return [self.mask_id if c == "_" else ord(c) - 93 for c in text]

    def decode(self, ids):
        return "".join("_" if i == self.mask_id else chr(i + 93) for i in ids)


CFG = EncoderConfig(
    vocab_size=14,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=24,
    initializer_range=0.5,
    pooler=False,
)


def tiny_model():
    a, b = jax.random.split(jax.random.key(1))
    return {"encoder": encoder.init(a, CFG), "mlm": heads.init_mlm(b, CFG)}


def test_texts_are_filled_in_few_shapes_and_in_order():
    params = tiny_model()
    model = blanks.BlankModel(CFG, params, Letters())
    texts = ["ab_c", "_", "hgf_e_ddcba", "a"]
    heard = []
    options = Options(max_new_tokens=3, order="left")
    found = blanks.fill_texts(model, texts, options, heard.append)
    assert "7 blanks filled in 7 calls" in heard[0] and len(found) == 4
    apply = jax.jit(lambda batch: encoder.apply(params["encoder"], CFG, batch).hidden)
    for text, (one,) in zip([*texts[:3], "a___"], found, strict=True):
        ids = np.array([1, *Letters().encode_with_masks(text), 2])
        score = 0.0
        while (ids == 3).any():
            at = np.flatnonzero(ids == 3)[0]
            row = np.zeros((1, 16), np.int32)
            row[0, : len(ids)] = ids
            mask = (np.arange(16) < len(ids))[None].astype(np.int32)
            hidden = apply({"input_ids": row, "attention_mask": mask})
            word = params["encoder"]["embeddings"]["word"]
            logits = heads.mlm_logits(params["mlm"], word, CFG, hidden)[0, at]
            logits = np.array(logits, np.float64)
            logits[:4] = logits[12:] = -np.inf
            ids[at] = logits.argmax()
            score += logits.max() - np.log(np.exp(logits).sum())
        assert one.ids == ids[1:-1].tolist() and "_" not in one.text
        assert one.score == pytest.approx(score, abs=1e-3)


def test_a_broken_model_is_named():
    """Formerly its scores were written as NaN, which is not valid JSON."""
    params = jax.tree.map(lambda x: x * np.nan, tiny_model())
    model = blanks.BlankModel(CFG, params, Letters())
    with pytest.raises(UserError, match="not finite numbers"):
        blanks.fill_texts(model, ["ab_c"], Options(order="left"))


def test_other_blocks_than_a_model_has_learnt_are_refused():
    """Formerly they were silently ignored."""
    model = blanks.BlankModel(CFG, {}, Letters(), block=4)
    with pytest.raises(UserError, match=r"--block=2: .* with blocks of 4 tokens"):
        blanks.fill_texts(model, ["ab_c"], Options(block=2))


def test_orders_that_are_drawn_give_several_texts():
    """Random orders give several texts; fixed orders give one and are refused."""
    for options in (Options(order="random"), Options(remask=0.2)):
        check_options(options._replace(num_return_sequences=2))
    with pytest.raises(UserError, match="they would all be the same"):
        check_options(Options(order="left", num_return_sequences=2))


def test_left_to_right_by_a_causal_model_is_its_generation():
    """Filling masks from left to right equals generation if the model is causal."""
    import dataclasses

    causal = dataclasses.replace(CFG, is_decoder=True)
    params = tiny_model()
    model = blanks.BlankModel(causal, params, Letters(), before=True)
    options = Options(max_new_tokens=6, order="left")
    ((filled,),) = blanks.fill_texts(model, ["abc"], options)
    never = np.zeros(14, np.float32)
    never[[*range(4), 12, 13]] = -1e9

    def barred(found):
        return found[0], found[1] + never

    slow = recomputing_decoder(causal)
    toy = slow._replace(
        prefill=lambda *args: barred(slow.prefill(*args)),
        extend=lambda *args: barred(slow.extend(*args)),
    )
    ids = np.array([[1, *Letters().encode_with_masks("abc")]], np.int32)
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    written = generate(toy, params, batch, max_new_tokens=6)
    assert filled.ids[3:] == np.asarray(written.ids)[0].tolist()
    assert filled.score == pytest.approx(float(written.scores[0]), abs=1e-3)


@pytest.mark.parametrize("name", ["confidence", "entropy"])
def test_a_model_of_no_numbers_fills_its_blanks_too(name):
    """Formerly the loop never ended, because NaN was sorted after padding."""
    done = unmask(
        lambda params, batch: jnp.full((*batch["mlm_positions"].shape, V), params),
        jnp.float32(jnp.nan),
        make_batch(),
        order=Order(name),
    )
    assert done.calls.tolist() == [5, 2, 8] and np.isnan(done.log_probs).any()
