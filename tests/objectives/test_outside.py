# SPDX-License-Identifier: Apache-2.0
"""Objectives from outside the package (tests/lab): what they may do and receive."""

import dataclasses
import json
import re
import traceback
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import read_rows
from lab import blanks, contrast
from test_objectives import CFG, TOKENIZER, B, L, make_batch

import bertjax
from bertjax import UserError, evaluate, registry, train
from bertjax.assembly import check_objective
from bertjax.assembly.check_objective import directions, say_where
from bertjax.checkpoints import manifest
from bertjax.config import schema
from bertjax.data.features.make_features import split_needs
from bertjax.data.tokenizers.tokenizer import load_tokenizer
from bertjax.measuring import estimates, measurements
from bertjax.models.flops import flops_per_token
from bertjax.objectives import mlm
from bertjax.objectives.base import Sum, TokenIds, row_keys
from bertjax.objectives.combine import combine
from bertjax.objectives.make_objective import make_objective
from bertjax.parallel.chips import CHIPS
from bertjax.training.state import make_state
from bertjax.training.step import make_eval_step, make_train_step, run_eval

pytestmark = pytest.mark.usefixtures("no_listener")


def run(arguments, workdir, *more):
    """Train in this process, and return the workdir."""
    given = [*arguments, *(f"--config.{key}" for key in more)]
    assert train.main([*given, f"--workdir={workdir}"]) == 0
    return workdir


def test_a_loss_of_any_name_falls(arguments, tmp_path):
    """eval.best=auto keeps the lowest loss, and patience waits for lower ones."""
    more = "objective=lab.contrast", "eval.best=auto", "eval.patience=3"
    more += "eval.every.steps=1", "optim.lr=1e-3", "optim.warmup.steps=0"
    path = run(arguments, tmp_path / "run", *more)
    key = "eval/valid/contrast"
    scores = {r["step"]: r[key] for r in read_rows(path) if key in r}
    best = min(scores, key=scores.get)
    assert scores[best] < scores[1] and [*scores][-1] == min(best + 3, 12)
    told = json.loads((path / "run.json").read_text())
    assert told["best"] == {"metric": key, "step": best, "value": scores[best]}
    assert told["greater_is_better"] == {"contrast": False}
    assert best in manifest.steps(path)


@pytest.mark.parametrize("flag", ["--dry_run", "--workdir={}"])
def test_two_heads_with_one_term(arguments, tmp_path, flag):
    """A masked LM under another name is refused: one of two losses would be lost."""
    given = [*arguments, "--config.objective=mlm+lab.again"]
    with pytest.raises(UserError) as e:
        train.main([*given, flag.format(tmp_path / "run")])
    said = "the heads mlm and again both return 'mlm_loss'"
    assert said in str(e.value) and "\n" not in str(e.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"coefficients": {"mlm_los": 2.0}}, "coefficients for mlm_los, which are no"),
        (
            {"weights": lambda batch: {"other": 1.0}},
            "weights() names other, which",
        ),
    ],
)
def test_terms_that_do_not_go_together(change, said):
    objective, _ = make_objective("mlm", CFG)
    params = jax.eval_shape(objective.init, jax.random.key(0))
    batches = SimpleNamespace(start=0, batch=lambda step, rows: make_batch())
    assert directions(objective, params, batches) == {"mlm_loss": False}
    wrong = dataclasses.replace(objective, **change)
    with pytest.raises(UserError, match=re.escape(said)):
        directions(wrong, params, batches)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"sums": lambda params, cfg, encoded, batch, rng: 1 / encoded.hidden},
            r'says reads="nowhere" reads encoded.hidden: .*test_outside.py, line \d+\)',
        ),
        (
            {"sums": lambda params, cfg, encoded, batch, rng: jax.random.split(rng)},
            r"objective=mine: TypeError: .*\(.*test_outside.py, line \d+\)$",
        ),
        (
            {"sums": lambda *_: {"mlm_loss": jnp.ones(())}},
            r"the head mlm: sums\(\) returns array of shape \(\) for 'mlm_loss'",
        ),
        (
            {"sums": lambda *_: Sum(jnp.ones(()), 1.0)},
            r"the head mlm: sums\(\) returns Sum of",
        ),
        ({"sums": lambda *_: None}, r"the head mlm: sums\(\) returns NoneType: it has"),
        (
            {"sums": lambda *_: {"mlm_loss": Sum(jnp.ones(4), 1.0)}},
            r"Sum of shape \(4,\), \(\) for 'mlm_loss': it has to return .*two scalars",
        ),
    ],
)
def test_a_head_s_usual_mistakes_are_one_line(change, said):
    head = dataclasses.replace(mlm.make_head(), reads="nowhere", **change)
    objective = combine([head], CFG)
    params = jax.eval_shape(objective.init, jax.random.key(0))
    batches = SimpleNamespace(start=0, batch=lambda step, rows: make_batch())
    with pytest.raises(UserError, match=said) as e, say_where("objective=mine"):
        directions(objective, params, batches)
    assert "\n" not in str(e.value)


def test_a_loss_without_a_gradient_is_refused():
    def sums(params, cfg, encoded, batch, rng):
        return {"mlm_loss": Sum(jnp.int32(jnp.sum(encoded.hidden)), jnp.ones(()))}

    head = dataclasses.replace(mlm.make_head(), reads="everywhere", sums=sums)
    objective = combine([head], CFG)
    params = jax.eval_shape(objective.init, jax.random.key(0))
    batches = SimpleNamespace(start=0, batch=lambda step, rows: make_batch())
    with pytest.raises(UserError, match="'mlm_loss' as int32, which has no gradient"):
        directions(objective, params, batches)


@pytest.mark.parametrize(
    ("leaf", "kind"), [(jnp.zeros(2, jnp.int32), "int32"), ("a", "str"), (1.0, "float")]
)
def test_parameters_are_arrays_of_floats(monkeypatch, leaf, kind):
    head = dataclasses.replace(contrast.make_head(), init=lambda *_: {"steps": leaf})
    monkeypatch.setattr(contrast, "make_head", lambda: head)
    objective, _ = make_objective("mlm+lab.contrast", CFG)
    said = rf"head contrast: init\(\) makes contrast/steps of type {kind}: parameters"
    with pytest.raises(UserError, match=said):
        jax.eval_shape(objective.init, jax.random.key(0))


def test_a_misspelt_host_half_is_said_before_that_there_are_two():
    with pytest.raises(UserError, match="'mlmm' is unknown; did you mean 'mlm'"):
        split_needs(frozenset({"mlm", "mlmm"}))
    with pytest.raises(UserError, match=r"clm and mlm each prepare the rows"):
        split_needs(frozenset({"mlm", "clm"}))


def test_a_library_beside_the_package_is_outside():
    """This also holds if the folder's name begins with the package's."""
    folder = Path(bertjax.__file__).parent
    assert str(folder / "train.py").startswith(registry.INSIDE)
    assert not f"{folder}_lab/heads.py".startswith(registry.INSIDE)


@pytest.mark.parametrize("folder", ["/home/me/", registry.SITE])
def test_the_line_of_an_installed_part_is_named(folder):
    """The line is not that of jax, which is installed beside the part."""
    package, own = registry.INSIDE[0], f"{folder}lab/heads.py"
    jax_s = f"{registry.SITE}jax/_src/random.py"
    files = f"{package}train.py", own, f"{package}losses.py", own, jax_s
    frames = [
        traceback.FrameSummary(file, line, "f") for line, file in enumerate(files)
    ]
    named = registry.line_at_fault(frames)
    assert (named.filename, named.lineno) == (own, 3)
    assert registry.line_at_fault([frames[0], frames[-1]]).filename == jax_s


@pytest.mark.parametrize("first, steps", [(900, 1000), (12, 13), (0, 1)])
def test_predictions_may_begin_late(first, steps):
    """For example, a mask rate may begin near 0. A phase without any predictions would
    train nothing."""
    batches = SimpleNamespace(
        start=4,
        end=4 + steps,
        loss_weights=["mlm_weights"],
        batch=lambda step: {"mlm_weights": np.array([0, step - 4 >= first])},
    )
    check_objective.check_predictions(batches)
    first = steps
    words = f"^no token is predicted between steps 4 and {4 + steps:,}, of which "
    with pytest.raises(UserError, match=words):
        check_objective.check_predictions(batches)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_is_logged_is_what_is_optimised(accumulate):
    """Losses are divided by `weights`, not by their Sum's weight; metrics by their
    own."""
    objective, _ = make_objective("mlm+lab.weighted", CFG)
    params = objective.init(jax.random.key(0))
    batch = make_batch()
    lengths = np.array([16, 4, 8, 2])
    batch["attention_mask"] = (np.arange(L) < lengths[:, None]).astype(np.int32)
    update = make_train_step(
        objective.sums,
        objective.weights,
        {"mlm_loss": 0.0},
        optax.sgd(1.0),
        lambda step: 1.0,
        seed=0,
        accumulate=accumulate,
    )
    after, metrics = jax.jit(update)(make_state(params, optax.sgd(1.0)), batch)
    own = objective.sums(params, batch, None)
    loss = float(own["weighted"].value) / B  # divided by `weights`
    assert float(own["weighted"].weight) < 1.0
    assert float(metrics["train/weighted"]) == pytest.approx(loss, rel=1e-5)
    assert float(metrics["train/loss"]) == pytest.approx(loss, rel=1e-5)
    length = metrics["train/mean_length"]
    assert float(length) == pytest.approx(B / np.sum(1 / lengths), rel=1e-5)

    def optimised(params):
        return objective.sums(params, batch, None)["weighted"].value / B

    moved = jax.tree.map(np.subtract, params, after.params)["weighted"]
    wanted = jax.grad(optimised)(params)["weighted"]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-3), moved, wanted)

    evaluate = jax.jit(make_eval_step(objective.sums, objective.weights))
    halves = [{k: v[half::2] for k, v in batch.items()} for half in range(2)]
    for batches in ([batch], halves):
        found = run_eval(evaluate, params, batches)
        assert found["weighted"] == pytest.approx(loss, rel=1e-5)
        assert found["mean_length"] == pytest.approx(float(length), rel=1e-5)


# ---------------------------------------------------------------- the whole batch
def test_a_whole_batch_is_not_parted(arguments, tmp_path):
    given = [*arguments, "--config.objective=lab.contrast", "--config.batch_size=16"]
    with pytest.raises(UserError) as e:
        train.main([*given, "--config.accumulate=2", f"--workdir={tmp_path / 'run'}"])
    said = "accumulate=2: objective=lab.contrast compares the rows of the whole batch"
    assert said in str(e.value) and str(e.value).endswith("or batch_size=8")
    name = "lab.contrast:whole_batch=12"
    with pytest.raises(UserError, match=r"evaluated on 12 rows at once .* fsdp = 8"):
        train.main([*arguments, f"--config.objective={name}", "--dry_run"])
    with pytest.raises(UserError, match="contrast 8 and other 4: give them one"):
        head = contrast.make_head()
        combine([head, dataclasses.replace(head, name="other", whole_batch=4)], CFG)


def test_an_evaluation_takes_the_rows_that_are_asked_for(arguments, tmp_path, capsys):
    """Its results do not depend on the batch size: 16 rows in training, 32 in
    evaluate."""
    more = "objective=lab.contrast", "batch_size=16", "total.steps=2"
    path = run(arguments, tmp_path / "run", *more, "eval.every.steps=2")
    told = read_rows(path)[-1]
    capsys.readouterr()
    evaluate.main([f"--workdir={path}", "--json"])
    found = json.loads(capsys.readouterr().out)
    for key in ("contrast", "contrast_hits"):
        assert found[key] == pytest.approx(told[f"eval/valid/{key}"], rel=1e-4)
    with pytest.raises(UserError, match=r"--batch_size=16: .* on 8 rows at once"):
        evaluate.main([f"--workdir={path}", "--batch_size=16"])


def test_a_mixture_is_evaluated_in_whole_groups(arguments, tmp_path, capsys):
    """With any batch size, a row belongs to the same objective as in training."""
    more = "objective=mntp*2+clm*1", "batch_size=24", "data.plan=full_sentences"
    path = run(arguments, tmp_path / "run", *more, "total.steps=2")
    told = read_rows(path)[-1]
    for given in ([], ["--batch_size=8"]):
        capsys.readouterr()
        evaluate.main([f"--workdir={path}", "--json", *given])
        found = json.loads(capsys.readouterr().out)
        for key in ("mntp_loss", "clm_loss"):
            assert found[key] == pytest.approx(told[f"eval/valid/{key}"], rel=1e-4)


# ---------------------------------------------------------------- tokens and keys
def test_a_row_has_a_key_of_its_own():
    batch = make_batch()
    keys = row_keys(batch, "input_ids", "nsp_labels")
    told = np.asarray(jax.random.key_data(keys))
    assert keys.shape == (B,) and len({*map(tuple, told)}) == B
    part = {k: v[2:] for k, v in batch.items()}
    again = jax.random.key_data(row_keys(part, "input_ids", "nsp_labels"))
    np.testing.assert_array_equal(again, told[2:])
    part["nsp_labels"] = 1 - part["nsp_labels"]
    other = np.asarray(jax.random.key_data(row_keys(part, "input_ids", "nsp_labels")))
    assert (other != told[2:]).any(axis=1).all()


def test_an_objective_is_told_the_tokens(monkeypatch):
    """The tokens that it hides in an evaluation depend only on the row."""
    tokens, seen = TokenIds.of(TOKENIZER), []
    assert tokens == TokenIds(special_ids=(0, 1, 2, 3, 4))
    hide = blanks.hide
    monkeypatch.setattr(blanks, "hide", lambda *a: seen.append(a[1]) or hide(*a))
    other = dataclasses.replace(tokens, mask_id=7)
    objective, _ = make_objective("lab.blanks", CFG, other)
    batch = {k: v for k, v in make_batch().items() if not k.startswith(("mlm", "nsp"))}
    batch["input_ids"][:, 0] = TOKENIZER.cls_id
    params = objective.init(jax.random.key(0))
    score = jax.jit(make_eval_step(objective.sums, objective.weights))
    halves = [{k: v[i : i + 2] for k, v in batch.items()} for i in (0, 2)]
    whole, parts = (run_eval(score, params, b) for b in ([batch], halves))
    assert seen[0] is other and whole == pytest.approx(parts, rel=1e-5)
    ids, hidden = hide(batch, other, None)
    assert not hidden[:, 0].any() and 0.2 < hidden.mean() < 0.8
    assert (np.asarray(ids)[np.asarray(hidden) > 0] == 7).all()
    with pytest.raises(UserError, match=r"option of lab\.blanks='tokens' is unknown"):
        make_objective("lab.blanks:tokens=1", CFG)


def test_training_tells_the_tokenizer_s_tokens(arguments, vocabulary, monkeypatch):
    seen, hide = [], blanks.hide
    monkeypatch.setattr(blanks, "hide", lambda *a: seen.append(a[1]) or hide(*a))
    train.main([*arguments, "--config.objective=lab.blanks", "--dry_run"])
    assert {*seen} == {TokenIds.of(load_tokenizer(str(vocabulary)))}


# ---------------------------------------------------------------- FLOPs
def test_without_flops_there_is_no_mfu(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bertjax.assembly.train_loop.peak_flops", lambda mesh: 1e12)
    said = "no MFU: objective=lab.contrast does not say its FLOPs (Head.flops, "
    few = "total.steps=2", "data.valid="
    path = run(arguments, tmp_path / "run", "objective=lab.contrast", *few)
    assert "perf/tokens_per_second" in read_rows(path)[-1]
    assert "perf/mfu" not in read_rows(path)[-1]
    assert capsys.readouterr().err.count(said) == 1


def test_flops_of_heads_add_up(capsys):
    plain, cfg = make_objective("mlm", CFG)
    counted, _ = make_objective("mlm+lab.contrast:flops=9", CFG)
    length, predictions = 128, 20
    sizes = {"input_ids": length, "mlm_ids": predictions, "mlm_positions": predictions}
    specs = {name: SimpleNamespace(shape=(n,)) for name, n in sizes.items()}
    found = counted.flops(specs)
    everywhere = flops_per_token(cfg, length, predictions, everywhere=True)
    assert found == everywhere + 9 > plain.flops(specs) + 9
    config = schema.base()
    config.objective = "lab.blanks"
    config.data.length, config.data.max_predictions = length, predictions
    assert measurements.flops_facts(config, counted) == {"flops_per_token": found}
    for name in ("lab.blanks", "lab.contrast"):
        objective, _ = make_objective(name, CFG)
        assert objective.flops is None
        assert measurements.flops_facts(config, objective) == {}
    assert "no MFU: objective=lab.blanks" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "known"), [("lab.contrast", False), ("mlm", True)])
def test_preflight_has_no_mfu_either(name, known):
    objective, cfg = make_objective(name, CFG)
    target = SimpleNamespace(cfgs={"": cfg}, objectives={"": objective})
    target.tokens = lambda shape: 1000
    target.mesh = SimpleNamespace(devices=np.zeros(1))
    target.config = SimpleNamespace(steps_per_call=1)
    names = "input_ids", "mlm_ids", "mlm_positions"
    target.specs = lambda shape: {n: SimpleNamespace(shape=(128,)) for n in names}
    facts = {"cycles": 1e6, "kernels": [], "unknown_loops": []}
    shape = SimpleNamespace(length=128, objective="")
    chip = CHIPS["TPU v5 lite"]
    found = estimates.time_estimate(target, shape, facts, chip)
    assert found["estimated_step_ms"] > 0
    assert (found["estimated_mfu"] is not None) == known
