# SPDX-License-Identifier: Apache-2.0
"""Adaptive masking by commands: evaluate writes weights, show and train use them."""

import json

import numpy as np
import pytest

from bertjax import UserError, evaluate, show, train
from bertjax.data.masking.mask_weights import read_mask_weights
from bertjax.data.tokenizers.tokenizer import load_tokenizer


@pytest.fixture
def weights(trained, corpus, tmp_path, capsys):
    """The weights that evaluate wrote for the run's model, on its training text."""
    file = tmp_path / "weights.json"
    text = f"--text={corpus / 'train.txt'}"
    given = [f"--workdir={trained}", "--what=mlm", text, "--examples=200", "--json"]
    assert evaluate.main([*given, f"--mask_weights={file}"]) == 0
    with_file = json.loads(capsys.readouterr().out)
    assert evaluate.main(given) == 0
    assert json.loads(capsys.readouterr().out) == with_file
    return file, with_file


def test_from_a_model_to_a_run(
    weights, arguments, vocabulary, tmp_path, capsys, no_listener
):
    file, scores = weights
    table = read_mask_weights(file, load_tokenizer(str(vocabulary)))
    # Ids that were never predicted have the mean; the others are around it.
    mean = 1 - scores["mlm_accuracy"]
    assert table[0] == pytest.approx(mean, abs=1e-4)
    assert np.ptp(table) > 0.1

    def hashes(*more):
        given = [*arguments, "--json", "--batches=3", *more]
        assert show.main(given) == 0
        return json.loads(capsys.readouterr().out)

    key = f"--config.data.mask_weights={file}"
    plain, *others = hashes(), *(hashes(key, f"--hosts={n}") for n in (1, 2, 4))
    assert others[0]["batch_sha256"] == others[1]["batch_sha256"]
    assert others[0]["batch_sha256"] == others[2]["batch_sha256"]
    assert plain["batch_sha256"] != others[0]["batch_sha256"]
    assert plain["selected_rate"] == others[0]["selected_rate"]
    assert others[0]["special_selected"] == 0

    few = [*arguments, key, f"--workdir={tmp_path / 'run'}"]
    assert train.main([*few, "--config.total.steps=2"]) == 0
    stores = json.loads((tmp_path / "run" / "run.json").read_text())["stores"]
    assert len(stores["data.mask_weights"]) == 64
    file.write_text(file.read_text() + "\n")  # the contents count, not the name
    more = ["--config.total.steps=4", "--allow_config_change"]
    with pytest.raises(UserError, match=r"^data\.mask_weights: the text .* changed"):
        train.main([*few, *more])


def test_what_is_refused(arguments, trained, weights, tmp_path):
    file, _ = weights
    key = f"--config.data.mask_weights={file}"
    other = ["--config.data.vocab=", "--config.data.vocab_size=300"]
    for given, words in (
        ([key, *other], "weights.json is of another tokenizer than the run's"),
        (["--config.data.mask_weights=no.json"], "no.json does not exist: give a file"),
        ([f"--config.data.mask_weights={tmp_path}"], "is a directory: give a file"),
        (
            [key, "--config.objective=clm"],
            "has no effect with objective=clm: leave it out, or where the config file "
            "has it give --config.data.mask_weights=$",
        ),
    ):
        with pytest.raises(UserError, match=f"^data.mask_weights=.*{words}"):
            show.main([*arguments, *given])
    for given, words in (
        (["--what=lm", f"--mask_weights={file}"], "it is read with --what=mlm"),
        (
            ["--what=mlm", "--mask_weights=/no/such/x.json"],
            "/no/such is not a directory",
        ),
    ):
        with pytest.raises(UserError, match=f"--mask_weights.*{words}"):
            evaluate.main([f"--workdir={trained}", *given])
