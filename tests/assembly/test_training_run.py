# SPDX-License-Identifier: Apache-2.0
"""The checks of a run before it reads its text."""

import importlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from ml_collections import config_flags

from bertjax import UserError, train
from bertjax import config as c
from bertjax.assembly import check_objective, command_line
from bertjax.assembly.open_teacher import (
    check_fit,
    check_places,
    check_use,
    read_teacher,
)
from bertjax.assembly.train_step import join_objectives
from bertjax.assembly.training_run import check_before_text
from bertjax.assembly.workdirs import known_total
from bertjax.objectives.base import Objective
from bertjax.parallel.mesh import make_mesh


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("optim.warmup", c.duration(steps=21), r"optim\.warmup is 21 steps, more than"),
        ("optim.schedule", "lab.triangle:cycle=3", r"optim\.schedule: .*cycle"),
        ("optim.name", "no.such", r"optim\.name='no\.such'"),
        ("model.attention", "cudnn", r"model\.attention=cudnn: it has no dropout"),
        ("accumulate", 3, "accumulate=3 does not divide batch_size=8"),
    ],
)
def test_what_is_refused_before_the_text_is_read(key, value, message):
    config = c.load_config("bert.py:smoke")
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    check_before_text(config, mesh)
    config_flags.config_path.set_value(key, config, value)
    with pytest.raises(UserError, match=message):
        check_before_text(config, mesh)


def test_a_phase_has_whole_groups_of_its_own_objective_alone():
    config = c.load_config("bert.py:smoke")
    config.objective, config.batch_size = "mlm", 16
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    config.phases = "steps=4 objective=mlm*15+clm*1; batch_size=8"
    check_before_text(config, mesh)
    config.phases = "steps=4 objective=mlm*15+clm*1 batch_size=8; batch_size=16"
    with pytest.raises(UserError, match=r"8 rows a device .* the 16 of a group"):
        check_before_text(config, mesh)


def test_attention_that_does_not_take_regions_is_refused_before_the_text_is_read():
    given = "--config=regions.py:smoke", "--config.data.length=128"
    config = command_line.parse(given).config
    config.model.attention_probs_dropout_prob = 0.0
    config.model.attention = "splash"
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    config.task.max_regions = 128
    check_before_text(config, mesh)
    config.task.max_regions = 20
    with pytest.raises(UserError, match=r"=splash: 148 tokens .*; 20 regions"):
        check_before_text(config, mesh)


@pytest.mark.parametrize(
    "file, best, said",
    [
        ("bert.py", "mlm_los", "did you mean 'eval/valid/mlm_loss'"),
        ("bert.py", "eval/other/mlm_loss", "eval/other/mlm_loss' is unknown"),
        ("bert.py", "nsp_accuracy", ""),
        ("finetune/classify.py", "acuracy", "did you mean 'eval/valid/accuracy'"),
        ("finetune/classify.py", "classify_loss", ""),
        ("finetune/seq2seq.py", "bleu", ""),
        ("finetune/qa.py", "best_f1", ""),  # as in docs/finetuning.md
        ("finetune/qa.py", "best_f2", "did you mean 'eval/valid/best_f1'"),
        ("regions.py", "shape_accuracy", ""),
        ("regions.py", "region_class_loss", ""),
        ("distilbert.py", "kl_loss", ""),  # without its teacher
    ],
)
def test_a_score_that_no_evaluation_has_is_seen_without_text(file, best, said):
    config = c.load_config(f"{file}:smoke")
    config.task.text, config.task.label = ("a", "b") if "tune" in file else ("", "")
    if file == "regions.py":
        config.task.update({"text": "a", "word_groups": "shape:circle|square"})
    config.data.valid, config.eval.best = "x", best
    if not said:
        check_objective.check_best(config)
        return
    with pytest.raises(UserError, match=rf"^eval\.best='.*{said}.*known: eval/valid/"):
        check_objective.check_best(config)
    config.data.masking = "lab.every_third"  # a part from outside: scores unknown
    check_objective.check_best(config)


def test_choices_that_the_text_alone_has_are_no_fault():
    config = c.load_config("finetune/choose.py:smoke")
    config.task.text = "text"
    check_before_text(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))


@pytest.mark.parametrize("phases", ["", "steps=4 length=64; length=32"])
def test_a_teacher_reads_the_rows_of_all_phases(phases):
    config = c.load_config("bert.py:smoke")
    config.data.length, config.phases = 32 if phases else 64, phases
    pieces = SimpleNamespace(kind="", pieces=[], lower_case=True, roles={})
    cfg = SimpleNamespace(max_length=32)
    teacher = SimpleNamespace(tokenizer=pieces, cfg=cfg, meta={})
    key = "phases: length" if phases else r"data\.length"
    with pytest.raises(UserError, match=f"reads 32 tokens, and {key} is 64"):
        check_fit(config, teacher, pieces, [])
    cfg.max_length = 64
    check_fit(config, teacher, pieces, [])


@pytest.mark.parametrize("option", ["teacher_weight=0.9", "teacher_temperature=4"])
def test_an_option_of_teachers_without_one_is_refused(option):
    config = c.load_config("finetune/classify.py:smoke")
    config.objective = f"classify:{option}"
    with pytest.raises(UserError, match=f"teacher {option.partition('=')[0]} says"):
        check_use(config, [])
    config.objective = "classify"
    check_use(config, [])


@pytest.mark.parametrize(
    "name, instead", [("bert.py:smoke", ", or take"), ("finetune/seq2seq.py:smoke", "")]
)
def test_a_teacher_that_nothing_reads_is_refused(name, instead):
    """The message suggests another objective, but not for a task, which has its own."""
    config = c.load_config(name)
    config.teacher = "runs/a"
    if not instead:
        config.task.text = "text"  # a task is given by its columns
    with pytest.raises(UserError, match=rf"leave it out{instead}( mlm\+distil)?$"):
        check_use(config, [])


def test_hidden_states_are_learnt_of_a_finetuned_teacher_too():
    """The teacher's classes are not used."""
    config = c.load_config("distilbert.py:smoke")
    config.objective = "distil:kl=0,cosine=1"
    pieces = SimpleNamespace(kind="", pieces=[], lower_case=True, roles={})
    facts = {"tokenizer": pieces, "cfg": SimpleNamespace(max_length=512)}
    teacher = SimpleNamespace(meta={"task": {"labels": ["a", "b"]}}, **facts)
    check_fit(config, teacher, pieces, [])


@pytest.mark.parametrize(
    "objective, theirs, right",
    [
        ("mlm+distil", "mlm+nsp", True),
        ("mlm+distil", "mntp*15+clm*1", False),
        ("distil", "mntp", False),
        ("distil:kl=0,cosine=1", "mntp", True),
        ("mntp+distil", "mlm", False),
        ("prefix+distil", "mlm", False),
        ("mntp+distil", "mntp", True),
        ("mlm+minilm", "mntp", True),
    ],
)
def test_a_teacher_predicts_a_token_where_its_student_does(objective, theirs, right):
    """Otherwise the student would learn the teacher's prediction of another token."""
    config, other = (c.load_config("distilbert.py:smoke") for _ in range(2))
    config.objective, other.objective = objective, theirs
    teacher = SimpleNamespace(config=other)
    if right:
        check_places(config, teacher)
        return
    with pytest.raises(UserError, match=r"predicts a masked token .*, and objective="):
        check_places(config, teacher)


def test_a_head_of_electras_generator_is_no_discriminators():
    config = c.load_config("distilbert.py:smoke")
    pair = SimpleNamespace(read_params=lambda: {"generator": {}, "mlm": {}})
    with pytest.raises(UserError, match="give the generator alone"):
        read_teacher(config, pair, {"encoder": {}, "mlm": {}})
    assert not read_teacher(config, pair, {"encoder": {}}).leaves


@pytest.mark.parametrize("key, other", [("pooling", "cls"), ("normalize", False)])
def test_a_teacher_of_vectors_makes_them_as_its_student(key, other):
    config, theirs = (c.load_config("finetune/retrieve.py:smoke") for _ in range(2))
    pieces = SimpleNamespace(kind="", pieces=[], lower_case=True, roles={})
    facts = {"tokenizer": pieces, "cfg": SimpleNamespace(max_length=512), "meta": {}}
    teacher = SimpleNamespace(config=theirs, **facts)
    check_fit(config, teacher, pieces, [])
    theirs.task[key] = other
    with pytest.raises(UserError, match=rf"with task\.{key}={other}, and here it is"):
        check_fit(config, teacher, pieces, [])


def test_lengths_in_other_units_than_steps_wait_for_the_text():
    config = c.load_config("bert.py:smoke")
    config.total, config.optim.warmup = c.duration(epochs=3), c.duration(steps=10**6)
    check_before_text(config, make_mesh(1, 1, 1, devices=jax.devices()[:1]))


@pytest.mark.parametrize(
    "key, fault",
    [("objective", "contrast.sums"), ("optim.name", "momentum.make_optimizer")],
)
def test_a_dry_run_finds_parts_that_do_not_fit(
    key, fault, arguments, monkeypatch, tmp_path
):
    """It finds a loss that fails only in training, and an optimizer that returns no
    updates."""
    module, _, function = fault.partition(".")
    module = importlib.import_module(f"lab.{module}")
    if function == "sums":
        sums = module.sums

        def wrong(params, cfg, encoded, batch, rng):
            if rng is not None:  # only in training
                encoded.hidden @ jnp.ones(3)
            return sums(params, cfg, encoded, batch, rng)

    else:

        def wrong(*args, **kw):
            return optax.GradientTransformation(lambda p: {}, lambda g, s, p: ({}, s))

    monkeypatch.setattr(module, function, wrong)
    given = [*arguments, f"--config.{key}=lab.{module.__name__[4:]}", "--dry_run"]
    with pytest.raises(UserError, match=r"an update cannot be made: .*line \d+\)$"):
        train.main(given)


def test_a_masker_s_own_fault_is_not_the_objective_s(arguments, monkeypatch):
    module = importlib.import_module("lab.every_third")
    monkeypatch.setattr(module, "choose_where", lambda *_: {}["a"])
    given = [*arguments, "--config.data.masking=lab.every_third", "--dry_run"]
    said = r"^data\.masking='lab\.every_third': KeyError: 'a' \(.*, line \d+\)$"
    with pytest.raises(UserError, match=said):
        train.main(given)


def test_phases_whose_objectives_cannot_train_one_model_are_refused(arguments):
    """ELECTRA's masked-LM head has the width of its generator, not of the encoder."""
    more = ["--config.objective=mlm", "--config.data.plan=full_sentences"]
    phases = "--config.phases=percent=25 objective=electra; mask_rate=0.3"
    with pytest.raises(UserError, match=r"phases: .* has the shapes .* two obj") as e:
        train.main([*arguments, *more, phases, "--dry_run"])
    assert "\n" not in str(e.value)


def test_steps_that_a_checkpoint_knows_are_those_of_its_config_alone():
    config = c.load_config("bert.py:smoke")
    assert known_total(config, {}) is None  # an earlier version's
    meta = {"config": config.to_dict(), "total_steps": 10}
    config.log.every = c.duration(steps=3)
    assert known_total(config, meta) == 10
    config.total = c.duration(steps=30)
    assert known_total(config, meta) is None


def test_objectives_without_an_encoder_train_one_set_of_parameters():
    """Objectives from outside with their own forward pass need no encoder."""

    def make(name):
        def no_terms(*_):
            return {}

        made = (lambda rng: {name: jnp.ones(2)}), no_terms, no_terms
        return Objective(*made, needs=frozenset(), coefficients={})

    for joined in join_objectives([make("a"), make("b")]):
        assert joined.init(jax.random.key(0)).keys() == {"a", "b"}
