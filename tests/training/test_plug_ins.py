# SPDX-License-Identifier: Apache-2.0
"""Optimizers, schedules and attention backends from outside the package (tests/lab)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import read_rows

from bertjax import UserError, train
from bertjax.assembly import validate
from bertjax.config import schema
from bertjax.training.optim import make_optimizer
from bertjax.training.schedules import make_schedule

SETTINGS = dict(wd=0.1, b1=0.9, b2=0.999, eps=1e-6, clip=0.0)


def config_of(**values):
    config = schema.base()
    config.data.train = config.data.vocab = "x"
    config.update_from_flattened_dict(
        {k.replace("__", "."): v for k, v in values.items()}
    )
    return config


def test_an_optimizer():
    """Two steps of gradient 1: the momentum is 1, then 1.5."""
    tx = make_optimizer("lab.momentum:decay=0.5", lambda step: 0.1, **SETTINGS)
    params = {"kernel": jnp.full((2, 2), 2.0)}
    grads, state = jax.tree.map(jnp.ones_like, params), tx.init(params)
    for momentum in (1.0, 1.5):
        updates, state = tx.update(grads, state, params)
        np.testing.assert_allclose(updates["kernel"], -0.1 * (momentum + 0.1 * 2.0))


def test_updates_of_other_shapes_are_refused(monkeypatch):
    """Otherwise they would be broadcast over the parameters."""
    total = optax.stateless(lambda grads, _: jax.tree.map(jnp.sum, grads))
    for parts in (total, [optax.identity(), total]):
        monkeypatch.setattr(
            "lab.momentum.make_optimizer", lambda wd, parts=parts: parts
        )
        tx = make_optimizer("lab.momentum", lambda step: 0.1, **SETTINGS)
        params = {"bag": {"kernel": jnp.ones((2, 3))}}
        words = r"lab\.momentum: its update of bag/kernel has the shape \(\), the grad"
        with pytest.raises(UserError, match=words):
            tx.update(params, tx.init(params), params)


def test_a_state_that_no_step_takes_is_refused(monkeypatch):
    part = optax.GradientTransformation(lambda params: {"kind": "sum"}, lambda *_: _)
    monkeypatch.setattr("lab.momentum.make_optimizer", lambda wd: part)
    tx = make_optimizer("lab.momentum", lambda step: 0.1, **SETTINGS)
    words = r"lab\.momentum: init\(\) makes a state whose kind is of type str"
    with pytest.raises(UserError, match=words):
        tx.init({"kernel": jnp.ones((2, 3))})


@pytest.mark.usefixtures("no_listener")
def test_a_schedule_that_cannot_be_traced_is_refused_before_a_step(
    arguments, tmp_path, monkeypatch
):
    def make_schedule(total):
        return lambda step: 1.0 if step < total else 0.5

    monkeypatch.setattr("lab.triangle.make_schedule", make_schedule)
    given = [*arguments, "--config.optim.schedule=lab.triangle"]
    words = r"optim\.schedule=lab\.triangle: an update cannot be made: Tracer.*"
    with pytest.raises(UserError, match=words + r"test_plug_ins\.py, line \d+\)$"):
        train.main([*given, f"--workdir={tmp_path / 'run'}"])


def test_layer_decay_and_clipping_are_those_of_every_optimizer():
    settings = SETTINGS | {"clip": 1.0, "wd": 0.0, "layer_decay": 0.5}
    tx = make_optimizer("lab.momentum", lambda step: 1.0, **settings)
    params = {"encoder": {"layers": {"kernel": jnp.ones((2, 1, 1))}}}
    grads = jax.tree.map(lambda p: 3.0 * p, params)
    updates, _ = tx.update(grads, tx.init(params), params)
    found = np.ravel(updates["encoder"]["layers"]["kernel"])
    np.testing.assert_allclose(found, [-0.25 / 2**0.5, -0.5 / 2**0.5], rtol=1e-6)


def test_a_schedule():
    """After a warm-up of 2 updates the rate falls twice from 1 to 0 in 8 updates."""
    rate = make_schedule("lab.triangle:cycles=2", 4.0, warmup=2, total=10)
    shares = [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 1.0, 0.75, 0.5, 0.25]
    np.testing.assert_allclose(rate(jnp.arange(10)), 4.0 * np.array(shares))


@pytest.mark.slow
def test_a_run_and_its_continuation(arguments, tmp_path):
    """All three plug-ins train, and a resumed run has the losses of an uninterrupted
    one."""
    more = (
        "optim.name=lab.momentum:decay=0.8,nesterov=true",
        "optim.schedule=lab.triangle:cycles=2",
        "model.attention=lab.softmax:implementation=xla",
    )
    given = [*arguments, "--config.log.every.steps=1", "--config.optim.lr=0.1"]
    given += [f"--config.{key}" for key in more]

    def run(path, *flags):
        assert train.main([*given, f"--workdir={path}", *flags]) == 0
        rows = read_rows(path)
        return {r["step"]: r["train/loss"] for r in rows if "train/loss" in r}

    whole = run(tmp_path / "whole")
    assert whole[12] < whole[1]
    parted = tmp_path / "parted"
    run(parted, "--config.total.steps=12")
    for step in (12, 8):
        for part in sorted((parted / "checkpoints" / f"{step}").rglob("*"))[::-1]:
            part.rmdir() if part.is_dir() else part.unlink()
        (parted / "checkpoints" / f"{step}").rmdir()
    assert run(parted) == whole


@pytest.mark.parametrize(
    "values, words",
    [
        (
            dict(optim__name="lab.nothing"),
            r"optim.name='lab.nothing': there is no module",
        ),
        (
            dict(optim__name="lab.triangle"),
            "lab.triangle does not define make_optimizer",
        ),
        (dict(optim__schedule="lab.momentum"), "does not define make_schedule"),
        (dict(optim__schedule="lab.triangle:cycles"), "'cycles' is not of the form"),
        (
            dict(model__attention="lab.nothing"),
            "model.attention='lab.nothing': there is",
        ),
        (
            dict(optim__name="lab.momentum", optim__b2=0.5),
            r"optim.b2=0.5 is not used by optim.name=lab.momentum, only by adamw",
        ),
        (
            dict(optim__name="lab.momentum", optim__cautious_decay=True),
            r"optim.cautious_decay=True is not used by optim.name=lab.momentum, only",
        ),
        (
            dict(optim__name="adafactor", optim__eps=0.0),
            r"optim.eps=0.0 is not used by optim.name=adafactor, only by adamw",
        ),
        (
            dict(optim__schedule="lab.triangle", optim__power=2.0),
            r"optim.power=2.0 is not used by optim.schedule=lab.triangle",
        ),
    ],
)
def test_what_a_config_is_refused_for(values, words):
    with pytest.raises(UserError, match=words):
        validate.check(config_of(**values))


def test_the_settings_that_an_optimizer_takes():
    validate.check(config_of(optim__name="lab.momentum:decay=0.5", optim__wd=0.5))


@pytest.mark.parametrize(
    "options, words",
    [
        (
            "decai=0.5",
            "option of lab.momentum='decai' is unknown; did you mean 'decay'",
        ),
        ("decay=much", "option of lab.momentum: decay=much is not a number"),
        ("nesterov=2", "option of lab.momentum: nesterov=2 is not true or false"),
        ("wd=0.5", "option of lab.momentum='wd' is unknown"),
    ],
)
def test_options_that_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        make_optimizer(f"lab.momentum:{options}", lambda step: 0.1, **SETTINGS)


def test_options_may_be_whole_numbers_booleans_and_what_earlier_configs_wrote():
    for text in ("decay=1,nesterov=1", "decay=1.0,nesterov=true"):
        tx = make_optimizer(f"lab.momentum:{text}", lambda step: 0.1, **SETTINGS)
        params = {"kernel": jnp.ones((2, 2))}
        updates, _ = tx.update(params, tx.init(params), params)
        np.testing.assert_allclose(updates["kernel"], -0.1 * (2.0 + 0.1), rtol=1e-6)
