# SPDX-License-Identifier: Apache-2.0
"""Workdirs of every kind: which commands may continue them, and what they lack."""

import json

import pytest

from bertjax import UserError
from bertjax.assembly import models, workdirs
from bertjax.checkpoints import workdir_kinds
from bertjax.config import schema, serialize


def make(path, said=None):
    """Write a workdir's config and, if given, `said` as its checkpoint's meta.json."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(serialize.to_json(schema.base()))
    (path / "overrides.json").write_text("{}")
    if said is not None:
        (path / "checkpoints/3").mkdir(parents=True)
        (path / "checkpoints/3/meta.json").write_text(json.dumps(said))
    return path


@pytest.mark.parametrize(
    "said, what",
    [
        (None, ""),
        ({"config": {}, "stores": {}}, workdir_kinds.RUN),
        ({"config": {}, "stores": {}, "runs": []}, workdir_kinds.SWEEP),
        ({"config": {}, "sentences": {}}, workdir_kinds.CONVERTED),
        ({"config": {}, "compressed": {}}, workdir_kinds.COMPRESSED),
        ({}, workdir_kinds.RUN),  # damaged: the checksum will tell
    ],
)
def test_kinds(tmp_path, said, what):
    path = make(tmp_path, said)
    assert workdir_kinds.kind(path) == what
    if what in ("", workdir_kinds.RUN):
        workdir_kinds.check_run(path)
    else:
        with pytest.raises(UserError, match=f"holds {what}, .*init_from={path}"):
            workdir_kinds.check_run(path)
    if what:
        with pytest.raises(UserError, match=f"holds {what}: take another workdir"):
            workdir_kinds.check_sweep(path, [(0, 1e-3)])
    (path / workdir_kinds.MEMBERS).mkdir()
    assert workdir_kinds.kind(path) == workdir_kinds.UNDER_WAY


@pytest.mark.parametrize("allow", [False, True])
def test_a_converted_model_is_no_run(tmp_path, allow):
    """It is refused before configs are compared, which would list every key."""
    other = schema.base()
    other.optim.lr = 0.5
    path = make(tmp_path, {"config": {}})
    with pytest.raises(UserError, match="holds a converted model") as refused:
        workdirs.check_workdir(path, other, allow)
    assert "optim.lr" not in str(refused.value)


def test_what_is_missing(tmp_path):
    """The message says what is missing: a directory, config.json or checkpoints."""
    cases = {tmp_path / "a": "no such directory"}
    (tmp_path / "b").mkdir()
    cases[tmp_path / "b"] = "holds no checkpoint, and no config.json"
    for inner in ("cache/snapshots/1", "old/0_Transformer", "old/1_Pooling"):
        (tmp_path / inner).mkdir(parents=True)
        (tmp_path / inner / "config.json").write_text("{}")
    cases[tmp_path / "cache"] = "config.json; there is one in .*/snapshots/1$"
    cases[tmp_path / "old"] = "there is one in .*/old/0_Transformer$"
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora/adapter_config.json").write_text("{}")
    cases[tmp_path / "lora"] = "it is an adapter: merge it into its model first"
    cases[make(tmp_path / "c")] = "its config.json is there, checkpoints/ missing"
    (make(tmp_path / "d") / "checkpoints").mkdir()
    cases[tmp_path / "d"] = "its config.json is there, checkpoints/ empty"
    for path, words in cases.items():
        with pytest.raises(UserError, match=words):
            models.open_model(str(path), "--model")


@pytest.mark.parametrize("text", ["{", "[]", "{}", "\xff"])
def test_damaged_results(tmp_path, text):
    assert workdir_kinds.read_object(tmp_path / workdir_kinds.RESULTS) == {}
    (tmp_path / workdir_kinds.RESULTS).write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"sweep\.json cannot be read: "):
        workdir_kinds.read_object(tmp_path / workdir_kinds.RESULTS)


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_hugging_face_model_is_no_workdir(tmp_path, weights, allow):
    """A run there would overwrite the model's config.json."""
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / weights).write_bytes(b"")
    with pytest.raises(UserError, match=f"holds a Hugging .*init_from={tmp_path}$"):
        workdirs.check_workdir(tmp_path, schema.base(), allow)
    (tmp_path / "config.json").write_text(serialize.to_json(schema.base()))
    (tmp_path / weights).unlink()
    workdirs.check_workdir(tmp_path, schema.base(), allow)  # killed at its start


@pytest.mark.parametrize("text", ["", "{not json", "[]"])
def test_a_damaged_run_json_is_named(tmp_path, text):
    path = make(tmp_path, {"config": {}, "stores": {}})
    workdirs.check_workdir(path, schema.base(), False)
    (path / "run.json").write_text(text)
    with pytest.raises(UserError, match=f"^{path}/run.json cannot be read: "):
        workdirs.check_workdir(path, schema.base(), False)
