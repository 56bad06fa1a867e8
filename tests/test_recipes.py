# SPDX-License-Identifier: Apache-2.0
"""ALBERT, ELECTRA, and an objective from outside: they train, resume and evaluate."""

import functools
import json
import re

import numpy as np
import pytest
from conftest import ROOT, read_rows, refused, succeeded, train_losses
from resuming import check_resuming

from bertjax.assembly import command_line, resolve
from bertjax.data.masking.masker import read_masker

PAGE = ROOT / "docs/add_an_objective.md"


def parse(name):
    return command_line.parse([f"--config={name}"]).config


# ---------------------------------------------------------------- values of recipes
def test_the_recipe_of_albert():
    made = parse("albert.py:xxlarge")
    cfg = resolve.encoder_config(made, 30_000)
    assert (cfg.hidden_size, cfg.embedding_width, cfg.groups) == (4096, 128, (0,) * 12)
    assert cfg.hidden_dropout_prob == cfg.attention_probs_dropout_prob == 0
    masking = read_masker(made.data)
    assert [round(11 * share) for share in masking.lengths] == [6, 3, 2]
    assert (made.batch_size, made.data.length, made.total.steps) == (4096, 512, 125_000)
    assert (made.optim.name, made.optim.lr, made.objective) == (
        "lamb",
        1.76e-3,
        "mlm+sop",
    )
    assert made.total.steps * made.optim.warmup.percent / 100 == 3_125


@pytest.mark.parametrize(
    "size, batch, length, lr, rate, generator",
    [
        ("small", 128, 128, 5e-4, 0.15, 64),
        ("base", 256, 512, 2e-4, 0.15, 256),
        ("large", 2048, 512, 2e-4, 0.25, 256),
    ],
)
def test_the_recipes_of_electra(size, batch, length, lr, rate, generator):
    from bertjax.objectives import electra
    from bertjax.objectives import parse as parse_objective

    made = parse(f"electra.py:{size}")
    cfg = resolve.encoder_config(made, 30_522)
    assert (made.batch_size, made.data.length, made.optim.lr) == (batch, length, lr)
    assert read_masker(made.data, made.data.mask_rate).rate == rate
    share = parse_objective(made.objective)[0][1]["generator"]
    small = electra.generator_config(cfg, round(cfg.hidden_size * share))
    assert small.hidden_size == generator
    warmup = made.total.steps * made.optim.warmup.percent / 100
    assert warmup == pytest.approx(10_000)


# ---------------------------------------------------------------- runs
def with_config(arguments, name):
    rest = [a for a in arguments if not a.startswith(("--config=", "--config.model"))]
    return [f"--config={name}", *rest]


@pytest.fixture(scope="module")
def runs(command, arguments, tmp_path_factory):
    """A function of a recipe's name -> the workdir of its run."""
    folder = tmp_path_factory.mktemp("recipes")

    @functools.cache
    def run(name):
        given = with_config(arguments, f"{name}.py:smoke")
        succeeded(command("train", *given, f"--workdir={folder / name}"))
        return folder / name

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["electra", "albert"])
def test_a_recipe_trains_resumes_and_evaluates(
    command, arguments, runs, tmp_path, name
):
    """A run resumed after step 8 ends like an uninterrupted one."""
    given = with_config(arguments, f"{name}.py:smoke")
    whole = runs(name)
    check_resuming(command, given, whole, tmp_path / "parts")
    losses = train_losses(whole)
    assert losses[-1] < losses[0]
    scored = succeeded(command("evaluate", f"--workdir={whole}", "--json"))
    scores = json.loads(scored.stdout)
    last = {
        k.removeprefix("eval/valid/"): v
        for k, v in read_rows(whole)[-1].items()
        if k.startswith("eval/")
    }
    for key, value in last.items():  # None: a share of nothing
        assert scores[key] == (value and pytest.approx(value, rel=1e-4)), key
    terms = {
        "albert": {"sop_loss", "sop_accuracy"},
        "electra": {f"rtd_{m}" for m in ("loss", "auc", "precision", "recall")},
    }[name]
    assert terms | {"mlm_loss", "mlm_accuracy"} <= set(last)


@pytest.mark.slow
def test_recipes_are_compared_on_the_same_predictions(command, runs, trained):
    same = "layout", "rows", "tokens", "predictions", "unigram_cross_entropy"
    found = []
    for workdir in (trained, runs("albert"), runs("electra")):
        given = f"--workdir={workdir}", "--what=mlm", "--json"
        scores = json.loads(succeeded(command("evaluate", *given)).stdout)
        found.append({key: scores[key] for key in same})
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_both_models_of_electra(command, runs, tmp_path):
    """The generator fills blanks and the discriminator embeds, also after export."""
    text = tmp_path / "lines.txt"
    text.write_text("An object is an instance of a class.\nNames are bound.\n")
    made = tmp_path / "hf"
    converted = command(
        "convert", f"--from={runs('electra')}", f"--to={made}", "--format=hf"
    )
    succeeded(converted)
    assert sorted(p.name for p in made.iterdir()) == ["discriminator", "generator"]

    def fill(model):
        blank = "An object is an [MASK] of a class."
        done = command("fill_mask", f"--model={model}", "--json", blank)
        (guesses,) = json.loads(succeeded(done).stdout)["masks"]
        return {g["token"]: pytest.approx(g["probability"], rel=1e-4) for g in guesses}

    def embed(model):
        out = tmp_path / "vectors.npy"
        flags = f"--model={model}", f"--text={text}", f"--out={out}"
        succeeded(command("embed", *flags))
        return np.load(out)

    assert fill(runs("electra")) == fill(made / "generator")
    np.testing.assert_allclose(
        embed(runs("electra")), embed(made / "discriminator"), rtol=1e-4, atol=1e-5
    )
    refused(
        command("fill_mask", f"--model={made / 'discriminator'}", "A [MASK]."),
        "no masked-LM head",
    )


@pytest.mark.slow
def test_the_page_on_adding_an_objective(command, arguments, tmp_path):
    """The page's code works as modules outside the package, and its commands run."""
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (_, ahead), (_, both), (_, bag), (_, line) = blocks
    assert [kind for kind, _ in blocks] == ["python", "sh", "python", "sh"]
    assert max(len(code.splitlines()) for code in (ahead, bag)) <= 40
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab/ahead.py").write_text(ahead)
    (tmp_path / "my_lab/bag.py").write_text(bag)
    rest = [a for a in arguments if not a.startswith("--config=")]
    for i, name in enumerate(("", "ahead", "ahead", "bag")):
        python, dash, module, *flags = [*both.splitlines(), line][i].split()
        assert (python, dash) == ("python", "-m")
        given = [flag for flag in flags if not flag.startswith("--workdir=")]
        given += [a for a in rest if not a.startswith("--config.batch_size=")]
        given += ["--config.batch_size=32"]  # a multiple of the groups
        run = tmp_path / str(i)
        given += [f"--workdir={run}"] * (module == "bertjax.train")
        module = module.removeprefix("bertjax.")
        succeeded(command(module, *given, env={"PYTHONPATH": str(tmp_path)}))
        if name:
            rows = read_rows(run)
            losses = [r[f"train/{name}_loss"] for r in rows if "train/loss" in r]
            assert losses[-1] < losses[0]
            assert f"eval/valid/{name}_loss" in rows[-1]
