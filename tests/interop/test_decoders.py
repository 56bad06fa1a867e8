# SPDX-License-Identifier: Apache-2.0
"""Causal models of Hugging Face (is_decoder=True)."""

import dataclasses
import json

import heads_data as data
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bertjax import UserError
from bertjax.interop import hf_read, hf_write
from bertjax.models import encoder, heads

LAYOUT = data.LAYOUTS["bert"]
ROLES = {"pad": 0, "unk": 4, "cls": 2, "sep": 3, "mask": 5}


def write(folder, **config):
    folder.mkdir()
    rng, shapes = np.random.default_rng(7), LAYOUT["shapes"]
    tensors = {
        name: rng.normal("LayerNorm.weight" in name, 0.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**LAYOUT["config"], **config}))


def test_a_decoder_goes_there_and_back(tmp_path):
    write(tmp_path / "a", is_decoder=True, architectures=["BertLMHeadModel"])
    model = hf_read.open_model(tmp_path / "a", "x")
    assert model.cfg.is_decoder
    back = tmp_path / "b"
    back.mkdir()
    hf_write.write_model(back, model.params(), model.cfg, ROLES, raw=model.raw)
    config = json.loads((back / "config.json").read_text())
    assert config["is_decoder"] is True
    assert config["architectures"] == ["BertLMHeadModel"]
    a, b = (load_file(tmp_path / n / "model.safetensors") for n in "ab")
    for name in a.keys() & b.keys():
        np.testing.assert_array_equal(a[name], b[name])
    assert hf_read.open_model(back, "x").cfg == model.cfg


def test_an_encoder_says_that_it_is_none(tmp_path):
    write(tmp_path / "a")
    cfg = hf_read.open_model(tmp_path / "a", "x").cfg
    _, _, config = hf_write.choose_family(cfg, ROLES, "bert")
    assert config["is_decoder"] is False


@pytest.mark.parametrize("family", ["roberta", "electra", "distilbert", "albert"])
def test_families_that_know_no_decoders(family, tmp_path):
    """They refuse to read a causal model, and it is written as another family."""
    write(tmp_path / "a", is_decoder=True)
    cfg = hf_read.open_model(tmp_path / "a", "x").cfg
    assert hf_write.choose_family(cfg, ROLES, family)[0].model_type == "bert"
    for unknown in (
        dict(classifier_transform=False),
        dict(relative_attention_num_buckets=32),
    ):
        with pytest.raises(UserError, match="no family"):
            hf_write.choose_family(dataclasses.replace(cfg, **unknown), ROLES, family)
    theirs = {**data.LAYOUTS[data.FAMILIES[family]]["config"], "is_decoder": True}
    (tmp_path / "a" / "config.json").write_text(json.dumps(theirs))
    with pytest.raises(UserError, match="is_decoder=True is not supported"):
        hf_read.open_model(tmp_path / "a", "x")


@pytest.mark.slow
def test_equal_to_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    write(tmp_path / "a", is_decoder=True)
    theirs = transformers.BertLMHeadModel.from_pretrained(tmp_path / "a").eval()
    model = hf_read.open_model(tmp_path / "a", "x")
    params, cfg = model.params(), encoder.without_pooler(model.cfg)
    batch = {"input_ids": data.IDS, "attention_mask": data.MASK}

    def ours(batch, **given):
        hidden = encoder.apply(params["encoder"], cfg, batch, **given).hidden
        word = params["encoder"]["embeddings"]["word"]
        return np.asarray(heads.mlm_logits(params["mlm"], word, cfg, hidden))

    def wanted(theirs, **batch):
        with torch.inference_mode():
            batch = {k: torch.tensor(np.array(v)) for k, v in batch.items()}
            return theirs(**batch).logits.numpy()

    real = data.MASK > 0
    found = ours(batch)
    np.testing.assert_allclose(found[real], wanted(theirs, **batch)[real], atol=1e-5)
    # They differ from those with full attention.
    apart = encoder.apply(
        params["encoder"], dataclasses.replace(cfg, is_decoder=False), batch
    )
    hidden = encoder.apply(params["encoder"], cfg, batch).hidden
    assert np.abs(np.asarray(apart.hidden - hidden))[real].max() > 0.1
    words = params["encoder"]["embeddings"]["word"][data.IDS]
    given = {"attention_mask": data.MASK}
    np.testing.assert_allclose(
        ours(given, inputs=words)[real],
        wanted(theirs, inputs_embeds=words, **given)[real],
        atol=1e-5,
    )
    back = tmp_path / "b"
    back.mkdir()
    hf_write.write_model(back, model.params(), model.cfg, ROLES, raw=model.raw)
    opened = transformers.AutoModelForCausalLM.from_pretrained(back).eval()
    assert type(opened).__name__ == "BertLMHeadModel"
    np.testing.assert_allclose(wanted(opened, **batch)[real], found[real], atol=1e-5)
