# SPDX-License-Identifier: Apache-2.0
"""A model family of another package: one file, and the entry point that names it."""

import json

import numpy as np
import pytest
from originals import bert, write_hf
from safetensors.numpy import load_file

from bertjax import UserError, convert, fill_mask
from bertjax.interop.families import all_families

TOY = """
import dataclasses
from bertjax.interop.families import bert
from bertjax.interop.family import tensors

names = {path: name.replace("encoder.layer", "blocks")
         for path, name in bert.FAMILY.names.items()}
names |= tensors("mlm/transform cloze.dense")
FAMILY = dataclasses.replace(
    bert.FAMILY,
    model_type="toy_bert",
    prefix="toy.",
    names=names,
    renamed={"hidden_size": "width"},
    class_prefix="Toy",
    write=lambda options: {"depth": options["num_hidden_layers"]},
)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    def add(source, value="toy_family:FAMILY"):
        package = tmp_path / "site"
        info = package / "toy-1.0.dist-info"
        info.mkdir(parents=True)
        (package / "toy_family.py").write_text(source)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[bertjax.families]\ntoy = {value}\n")
        monkeypatch.syspath_prepend(str(package))
        all_families.cache_clear()

    yield add
    all_families.cache_clear()


def test_a_family_from_outside_goes_there_and_back(install, tmp_path, capsys):
    renames = [
        ("cls.predictions.transform.dense", "cloze.dense"),
        ("encoder.layer", "blocks"),
        ("bert.", "toy."),
    ]
    given = {}
    for name, array in bert().hf.items():
        for old, new in renames:
            name = name.replace(old, new)
        given[name] = array
    config = {"hidden_size": None, "width": 16, "hidden_act": "gelu_new"}
    write_hf(tmp_path / "a", given, "toy_bert", **config)
    with pytest.raises(UserError, match="model_type='toy_bert' cannot be read"):
        convert.main([f"--from={tmp_path / 'a'}", f"--to={tmp_path / 'x'}"])
    install(TOY)
    convert.main([f"--from={tmp_path / 'a'}", f"--to={tmp_path / 'workdir'}"])
    convert.main(
        [f"--from={tmp_path / 'workdir'}", f"--to={tmp_path / 'b'}", "--format=hf"]
    )
    back = load_file(tmp_path / "b/model.safetensors")
    assert back.keys() == given.keys()
    for name, array in given.items():
        np.testing.assert_array_equal(back[name], array, err_msg=name)
    written = json.loads((tmp_path / "b/config.json").read_text())
    assert written["architectures"] == ["ToyForPreTraining"]
    assert (written["width"], written["depth"]) == (16, 2)

    # Its encoder is BERT's, so it computes what a BERT with these tensors does.
    write_hf(tmp_path / "bert", bert().hf, "bert", hidden_act="gelu_new")
    capsys.readouterr()
    lines = []
    for model in ("bert", "a", "workdir"):
        fill_mask.main([f"--model={tmp_path / model}", "--json", "w1 [MASK] w3"])
        lines.append(capsys.readouterr().out)
    assert json.loads(lines[0])["masks"] and lines[0] == lines[1] == lines[2]


def test_a_family_that_cannot_be_imported_is_named(install):
    install("", value="toy_family:ABSENT")
    with pytest.raises(UserError, match=r"bertjax\.families: toy_family:ABSENT"):
        all_families()


def test_an_encoder_is_written_as_the_first_family_that_has_it():
    """BERT comes first, so a BERT is not written as a later family with its encoder."""
    order = list(all_families())
    assert order[:2] == ["bert", "roberta"]
    assert {"albert", "camembert", "distilbert", "electra", "modernbert", "mpnet"} < {
        *order
    }
