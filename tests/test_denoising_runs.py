# SPDX-License-Identifier: Apache-2.0
"""Runs with T5's and BART's configs train, resume bit for bit, and can be shown."""

import json

import pytest
from conftest import read_rows, succeeded, train_losses
from resuming import check_resuming

from bertjax import UserError, show

CONFIGS = {"t5": ["--config.data.packed=True"], "bart": []}


@pytest.fixture(scope="module")
def flags(corpus, tmp_path_factory):
    cache = tmp_path_factory.mktemp("stores")

    def of(config):
        return [
            f"--config={config}.py:smoke",
            f"--config.data.train={corpus / 'train.txt'}",
            f"--config.data.valid={corpus / 'valid.txt'}",
            f"--config.data.cache={cache}",
            "--config.data.vocab_size=600",
            "--config.data.length=48",
            "--config.model.hidden_size=32",
            "--config.model.intermediate_size=64",
            "--config.total.steps=12",
            "--config.eval.every.steps=6",
            "--config.eval.examples=16",
            "--config.checkpoint.every.steps=4",
            *CONFIGS.get(config, []),
        ]

    return of


@pytest.mark.parametrize("config", CONFIGS)
def test_a_run_learns_and_t5s_resumes_bit_for_bit(config, command, flags, tmp_path):
    whole = tmp_path / "whole"
    said = succeeded(command("train", *flags(config), f"--workdir={whole}")).stderr
    assert {"t5": "15% in spans of 3", "bart": "permute, infill"}[config] in said
    losses = train_losses(whole)
    assert losses[-1] < losses[0] - 0.05
    rows = read_rows(whole)
    keys = {key for row in rows for key in row}
    assert {"train/denoise_accuracy", "eval/valid/denoise_loss"} <= keys
    assert all(0.3 < row["data/fill"] <= 1 for row in rows if "data/fill" in row)
    pairs = tmp_path / "pairs.jsonl"
    pair = {"sentence_good": "The sea is calm .", "sentence_bad": "The sea are ."}
    pairs.write_text(json.dumps(pair | {"UID": "agreement"}) + "\n")
    how = ["--what=pairs", f"--text={pairs}", f"--workdir={whole}"]
    told = succeeded(command("evaluate", *how, "--json")).stdout
    assert json.loads(told)["scorer"] == "pll"
    refused = command("evaluate", *how, "--scorer=elbo")
    assert refused.returncode == 2 and "use --scorer=pll" in refused.stderr
    if config == "t5":
        check_resuming(command, flags(config), whole, tmp_path / "parts")


@pytest.mark.parametrize("config", CONFIGS)
def test_both_sides_are_shown(config, flags, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert show.main([*flags(config), f"--html={page}"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    gathered, read, written = (
        next(line for line in lines if line.startswith(name)).removeprefix(name)
        for name in ("gathered", "input", "target")
    )
    if config == "t5":
        assert "[CLS]" in gathered and "[CLS]" not in read + written
        assert "[<extra_id_0>]" in read and "<extra_id_0>" in written
    else:
        assert "[<mask>]" in read and written.split() == gathered.split()
    assert "<extra_id_0>" not in gathered
    assert "class='masked'" in page.read_text()
    parts = []
    for hosts in (1, 4):
        assert show.main([*flags(config), "--json", f"--hosts={hosts}"]) == 0
        parts.append(json.loads(capsys.readouterr().out))
    assert parts[0] == parts[1] and len(parts[0]["batch_sha256"]) == 1
    assert parts[0]["spans"] > 8 and parts[0]["target_tokens"] > 50
    if config == "t5":
        assert 0.12 < parts[0]["selected_rate"] < 0.2
        assert parts[0]["special_selected"] == 0


@pytest.mark.parametrize(
    "config, key, said",
    [
        ("t5", "data.extra_ids=0", r"give data\.extra_ids=100"),
        ("t5", "data.noise=rotate", r"data\.noise=rotate has no effect with objective"),
        ("t5", "model.num_decoder_layers=0", "needs a decoder"),
        ("bart", "data.noise=infil:poisson:3", "did you mean 'infill'"),
        (
            "bert",
            "data.noise=rotate",
            r"data\.noise=rotate has no effect with objective",
        ),
        ("bart", "data.mask_unit=span", r"data\.mask_unit='span' is unknown"),
    ],
)
def test_what_is_refused(config, key, said, flags):
    with pytest.raises(UserError, match=said):
        show.main([*flags(config), f"--config.{key}"])
