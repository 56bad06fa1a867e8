# SPDX-License-Identifier: Apache-2.0
"""The sums of the token head, which all objectives that predict ids use."""

import dataclasses

import jax
import numpy as np
import pytest
from test_objectives import CFG, B, L, V, make_batch

from bertjax import UserError
from bertjax.models import encoder
from bertjax.objectives.combine import combine
from bertjax.objectives.token_head import make_token_head, score_tokens


@pytest.mark.parametrize("mb", [0, 1])
def test_a_norm_divides_the_loss_and_weights_do_not_count_in_the_accuracy(mb):
    cfg = dataclasses.replace(CFG, pooler=False, max_logits_mb=mb)
    objective = combine([make_token_head("own", frozenset(), everywhere=True)], cfg)
    params = objective.init(jax.random.key(0))
    batch = {k: v for k, v in make_batch().items() if not k.startswith("mlm")}
    sums = jax.jit(lambda batch: objective.sums(params, batch, None))

    hidden = encoder.apply(params["encoder"], cfg, batch).hidden
    none = np.zeros((B, L), np.int32)
    logits = score_tokens(params, cfg, hidden, none, none.astype("f4"))[1]
    ids = np.array(logits.argmax(-1), np.int32)  # all right, except one
    ids[0, 2] = (ids[0, 2] + 1) % V

    def score(weights, **more):
        own = {"own_ids": ids, "own_weights": weights.astype("f4")}
        sized = batch | own | more
        return sums(sized), objective.weights(sized)["own_loss"]

    even = np.zeros((B, L))
    even[0, 1:4] = 1
    uneven = even * np.arange(1, L + 1)
    norm = np.full(B, 7.0, np.float32)
    (plain, by_weights), (normed, by_norm) = score(uneven), score(uneven, own_norm=norm)
    assert float(by_weights) == 2 + 3 + 4 and float(by_norm) == 7 * B
    assert float(plain["own_loss"].value) == float(normed["own_loss"].value)
    assert [float(x) for x in plain["own_accuracy"]] == [2 + 4, 2 + 3 + 4]
    assert [float(x) for x in normed["own_accuracy"]] == [2, 3]


def test_the_loss_is_of_capped_logits_in_pieces_too():
    terms, grads = {}, {}
    for mb in (0, 1):
        cfg = dataclasses.replace(CFG, pooler=False, max_logits_mb=mb)
        cfg = dataclasses.replace(cfg, vocab_size=40_000, final_logit_softcapping=0.5)
        heads = [make_token_head("mlm", frozenset(), z_loss=0.1)]
        objective = combine(heads, cfg)
        params = objective.init(jax.random.key(0))
        params["mlm"]["bias"] = params["mlm"]["bias"].at[::3].set(4.0)

        def loss(params, objective=objective):
            sums = objective.sums(params, make_batch(), None)
            return sums["mlm_loss"].value + 0.1 * sums["mlm_z_loss"].value, sums

        run = jax.jit(jax.grad(loss, has_aux=True))
        grads[mb], terms[mb] = run(params)
    for name in ("mlm_loss", "mlm_z_loss"):
        np.testing.assert_allclose(*(terms[mb][name].value for mb in terms), rtol=1e-5)
    # The logits are almost equal, so the loss is near ln V.
    mean = float(terms[0]["mlm_loss"].value / terms[0]["mlm_loss"].weight)
    assert abs(mean - np.log(40_000)) < 1
    for x, y in zip(*map(jax.tree.leaves, grads.values()), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-6)


def test_a_z_loss_below_0_is_refused():
    with pytest.raises(UserError, match="mlm's z_loss=-1 must be 0 or more"):
        make_token_head("mlm", frozenset(), z_loss=-1)
