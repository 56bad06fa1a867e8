# SPDX-License-Identifier: Apache-2.0
"""Maskers by dotted names: the example in the docs, and one without draws."""

import json
import re
import sys

import numpy as np
import pytest
from conftest import ROOT, read_rows, refused, succeeded
from made_up import fake_tokenizer

from bertjax import UserError, train
from bertjax.data import counter_rng
from bertjax.data.masking.choose import Chosen, choose_where
from bertjax.data.masking.masker import make_masker, mask_tokens
from bertjax.data.masking.vocab_tables import make_tables

PAGE = ROOT / "docs/add_a_masker.md"
TOKENIZER = fake_tokenizer(50)
IDS = np.array([[2, 11, 12, 13, 14, 15, 16, 3], [2, 21, 22, 3, 23, 24, 3, 0]], np.int32)
KEYS = counter_rng.fold(5, np.arange(2))


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """Write the docs' example as my_lab/thirds.py into a folder on the import path."""
    ((_, code),) = re.findall(r"```(python)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab/thirds.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_lab.thirds"
    for name in ("my_lab", "my_lab.thirds"):
        sys.modules.pop(name, None)


def mask(masker, P=3):
    tables = masker.tables(TOKENIZER, None)
    return mask_tokens(IDS, (IDS > 0).astype(np.int32), KEYS, masker, tables, P)


def test_every_third_token_of_text_is_masked():
    out = mask(make_masker("lab.every_third"))
    assert out.input_ids.tolist() == [
        [2, 11, 12, 4, 14, 15, 4, 3],
        [2, 21, 22, 3, 4, 24, 3, 0],
    ]
    assert out.mlm_positions.tolist() == [[3, 6, 0], [4, 0, 0]]
    assert out.mlm_ids.tolist() == [[13, 16, 0], [23, 0, 0]]
    assert out.mlm_weights.tolist() == [[1, 1, 0], [1, 0, 0]]
    short = mask(make_masker("lab.every_third"), P=1)
    assert short.mlm_positions.tolist() == [[3], [4]]
    assert short.input_ids[0].tolist() == [2, 11, 12, 4, 14, 15, 16, 3]


def test_the_page_s_masker_draws_by_row_and_takes_options(lab):
    always = mask(make_masker(f"{lab}:keep=0.0,every=2"))
    assert always.mlm_positions.tolist() == [[2, 4, 6], [2, 5, 0]]
    assert always.input_ids[0].tolist() == [2, 11, 4, 13, 4, 15, 4, 3]
    never = mask(make_masker(f"{lab}:keep=1.0"))
    assert (never.input_ids == IDS).all() and never.mlm_weights.sum() == 3
    masker = make_masker(f"{lab}:keep=0.5", rate=0.25)
    assert masker.rate == 0.25
    tables, real = make_tables(TOKENIZER), (IDS > 0).astype(np.int32)
    both = mask_tokens(IDS, real, KEYS, masker, tables, 3)
    one = mask_tokens(IDS[1:], real[1:], KEYS[1:], masker, tables, 3)
    assert (both.input_ids[1:] == one.input_ids).all()


@pytest.mark.parametrize(
    "name, more, words",
    [
        ("no_such_module.masker", {}, ["no_such_module.masker", "PYTHONPATH"]),
        ("lab.blanks", {}, ["lab.blanks does not define make_masker"]),
        ("lab.every_third:every=2", {}, ["option of lab.every_third='every' is unkn"]),
        ("lab.every_third", {"rate": 0.2}, ["option of lab.every_third='rate' is unk"]),
        ("lab.every_third", {"unit": "word"}, ["data.mask_unit", "make_masker"]),
        ("lab.every_third", {"paper_compat": True}, ["data.paper_compat"]),
        ("lab.every_third:rate", {}, ["'rate' is not of the form OPTION=VALUE"]),
        ("bret", {}, ["did you mean 'bert'"]),
    ],
)
def test_what_is_refused(name, more, words):
    with pytest.raises(UserError, match=r"^data\.(masking|\w+ refines)") as e:
        make_masker(name, **more)
    assert all(word in str(e.value) for word in words), e.value


@pytest.mark.parametrize(
    "options, words",
    [
        ("kep=0.2", r"option of my_lab\.thirds='kep' is unknown; did you mean 'keep'"),
        ("keep=abc", r"option of my_lab\.thirds: keep=abc is not a number"),
        ("every=abc", r"option of my_lab\.thirds: every=abc is not a number"),
        ("rate=2", "its rate 2 is not a number above 0 and at most 1"),
        ("rate=abc", "its rate abc is not a number above 0 and at most 1"),
    ],
)
def test_options_are_checked(lab, options, words):
    with pytest.raises(UserError, match=words):
        make_masker(f"{lab}:{options}")


def test_what_is_no_masker_is_refused(monkeypatch):
    monkeypatch.setattr("lab.every_third.make_masker", lambda: None)
    words = r"^data\.masking: lab\.every_third\.make_masker must return .*rate.* None$"
    with pytest.raises(UserError, match=words):
        make_masker("lab.every_third")


def test_a_masker_that_writes_into_its_rows_is_no_right_guess():
    """Otherwise it would predict what it wrote."""
    masker = make_masker("lab.every_third")
    chosen = masker.choose

    def choose(rows, tables, P):
        rows.ids[:, 3] = tables.mask_id
        return chosen(rows, tables, P)

    masker.choose = choose
    with pytest.raises(ValueError, match="read-only"):
        mask(masker)


def test_padding_is_not_predicted():
    masker = make_masker("lab.every_third")
    masker.choose = lambda rows, tables, P: choose_where(rows.ids == 0, P)
    with pytest.raises(UserError, match="the masker chose padding"):
        mask(masker)


def test_more_predictions_than_there_is_room_for_are_refused():
    masker = make_masker("lab.every_third")
    chosen = masker.choose
    masker.choose = lambda rows, tables, P: chosen(rows, tables, 9)
    with pytest.raises(UserError, match=r"2 tokens of a row .* room for 1 pred"):
        mask(masker, P=1)


@pytest.mark.usefixtures("no_listener")
def test_a_masker_that_never_chooses_is_refused(arguments, tmp_path, monkeypatch):
    """Such a run used to train to its end with a loss of 0, and evaluated to nan."""
    masker = type(make_masker("lab.every_third"))
    monkeypatch.setattr(
        masker, "choose", lambda self, rows, *_: choose_where(rows.ids < 0, 1)
    )
    given = [*arguments, "--config.data.masking=lab.every_third"]
    words = "^no token is predicted between steps 0 and 12, of which 12 batches were "
    with pytest.raises(UserError, match=words):
        train.main([*given, f"--workdir={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_show_and_train_with_a_masker_from_outside(command, arguments, tmp_path):
    given = [*arguments, "--config.data.masking=lab.every_third"]
    env = {"PYTHONPATH": str(ROOT / "tests")}
    shown = succeeded(command("show", *given, "--json", env=env))
    rates = json.loads(shown.stdout)
    assert rates["mask_rate"] == 1 and rates["special_selected"] == 0
    assert 0.25 < rates["selected_rate"] <= 1 / 3
    run = tmp_path / "run"
    succeeded(command("train", *given, f"--workdir={run}", env=env))
    losses = [r["train/mlm_loss"] for r in read_rows(run) if "train/mlm_loss" in r]
    assert losses[-1] < losses[0]
    no_such = "--config.data.masking=no_such_module.masker"
    wrong = command("train", *arguments, no_such, f"--workdir={tmp_path / 'w'}")
    refused(wrong, "no_such_module.masker")


@pytest.mark.slow
def test_the_page_on_adding_a_masker(lab, command, arguments, tmp_path):
    """The page's commands run with its module, on the tests' text."""
    ((_, shell),) = re.findall(r"```(sh)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    rest = [a for a in arguments if not a.startswith("--config=")]
    env = {"PYTHONPATH": str(tmp_path)}
    for line in shell.splitlines():
        python, dash, module, *flags = line.split()
        assert (python, dash) == ("python", "-m")
        flags = [f for f in flags if not f.startswith("--workdir=")]
        if module == "bertjax.train":
            flags.append(f"--workdir={tmp_path / 'run'}")
        name = module.removeprefix("bertjax.")
        succeeded(command(name, *flags, *rest, env=env))
    assert read_rows(tmp_path / "run")[-1]


@pytest.mark.parametrize(
    "wrong", [lambda t: t + 10**6, lambda t: -t, lambda t: t * 1.5, lambda t: t[:1]]
)
def test_ids_that_the_vocabulary_has_not_are_refused(wrong, monkeypatch):
    masker = make_masker("lab.every_third")
    monkeypatch.setattr(
        type(masker), "corrupt", lambda self, truth, *_: wrong(truth), raising=False
    )
    with pytest.raises(UserError, match="corrupt must return ids from 0 to 49, i32"):
        mask(masker)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda rows: rows.ids > 9, "must return a Chosen with columns of 2 rows"),
        (lambda rows: choose_where(rows.ids.T > 9, 3), "columns of 2 rows"),
        (
            lambda rows: Chosen(*[np.array([[9], [1]])] * 3),
            "column 1 to 9 of rows of 8 tokens",
        ),
    ],
)
def test_columns_that_a_row_has_not_are_refused(wrong, message, monkeypatch):
    masker = make_masker("lab.every_third")
    monkeypatch.setattr(
        type(masker), "choose", lambda self, rows, *_: wrong(rows), raising=False
    )
    with pytest.raises(UserError, match=message):
        mask(masker)
