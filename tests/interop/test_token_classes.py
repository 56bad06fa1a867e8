# SPDX-License-Identifier: Apache-2.0
"""Models that tag words, as transformers' ...ForTokenClassification."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_hf import roles, write

from bertjax import UserError
from bertjax.interop import export, hf

LABELS = ["O", "B-X", "I-X"]
CLASSES = {
    "bert": "BertForTokenClassification",
    "roberta": "RobertaForTokenClassification",
    "albert": "AlbertForTokenClassification",
    "electra_discriminator": "ElectraForTokenClassification",
    "distilbert": "DistilBertForTokenClassification",
}


@pytest.mark.parametrize("name", [*CLASSES, "modernbert"])
def test_names(name, tmp_path):
    write(tmp_path / "a", name)
    model = hf.open_model(tmp_path / "a", "x")
    cfg = dataclasses.replace(model.cfg, pooler=False)
    kernel = np.arange(3 * cfg.hidden_size, dtype=np.float32).reshape(-1, 3)
    params = {"encoder": dict(model.params()["encoder"])}
    params["encoder"].pop("pooler", None)
    params["tag"] = {"kernel": kernel, "bias": np.arange(3, dtype=np.float32)}
    (tmp_path / "b").mkdir()
    given = tmp_path / "b", params, cfg, roles(name), model.family.model_type
    if name not in CLASSES:
        with pytest.raises(UserError, match="is not the same"):
            export.write_model(*given, labels=LABELS)
        return
    export.write_model(*given, labels=LABELS)
    found = load_file(tmp_path / "b/model.safetensors")
    assert found["classifier.weight"].tolist() == kernel.T.tolist()
    assert found["classifier.bias"].tolist() == [0, 1, 2]
    rest = {k for k in found if not k.startswith("classifier.")}
    assert all(k.startswith(model.family.prefix) for k in rest)
    assert not any("pooler" in k for k in rest)
    told = json.loads((tmp_path / "b/config.json").read_text())
    assert told["architectures"] == [CLASSES[name]]
    assert told["id2label"] == {"0": "O", "1": "B-X", "2": "I-X"}
    assert "problem_type" not in told
