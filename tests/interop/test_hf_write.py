# SPDX-License-Identifier: Apache-2.0
"""Which options of an encoder a Hugging Face config.json can express."""

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

from bertjax import UserError
from bertjax.assembly import command_line, resolve
from bertjax.interop import hf_write, write_tensors
from bertjax.models.config import EncoderConfig
from bertjax.models.families import FAMILIES

ROLES = dict(pad=0, unk=1, cls=2, sep=3, mask=4)
by_family = pytest.mark.parametrize("model_type", ["bert", "gpt2", "modernbert"])


def encoder_of(model_type, **change):
    sizes = dict(num_hidden_layers=4, num_attention_heads=2, intermediate_size=24)
    fixed = {**FAMILIES[model_type].fixed, "max_position_embeddings": 20, **change}
    return EncoderConfig(vocab_size=30, hidden_size=16, **sizes, **fixed)


@by_family
@pytest.mark.parametrize(
    "change",
    [
        dict(qk_norm=True),
        dict(final_logit_softcapping=15.0),
        dict(embedding_skip=True),
        dict(value_skip=True),
        dict(unet_skips=True),
    ],
)
def test_what_no_class_of_theirs_computes_is_refused_by_name(change, model_type):
    ((name, value),) = change.items()
    with pytest.raises(UserError, match=f"model.{name}={value}: no class of trans"):
        hf_write.choose_family(encoder_of(model_type, **change), ROLES, model_type)


@by_family
@pytest.mark.parametrize(
    "change", [{}, dict(hidden_act="relu2"), dict(zero_init_outputs=True)]
)
def test_what_their_classes_compute_is_written(change, model_type):
    cfg = encoder_of(model_type, **change)
    family, _, config = hf_write.choose_family(cfg, ROLES, model_type)
    assert family.model_type == model_type
    assert ("relu2" in config.values()) == ("hidden_act" in change)


@pytest.mark.parametrize("name", ["modern.py:tiny", "modern.py:base", "quickstart.py"])
def test_recipes_that_say_so_open_in_transformers(name):
    made = command_line.parse([f"--config={name}"]).config
    cfg = resolve.encoder_config(made, 9_000 if "base" not in name else 50_368)
    family, written, config = hf_write.choose_family(cfg, ROLES, "")
    assert (family.model_type, config["hidden_activation"]) == ("modernbert", "relu2")
    assert all(cfg.is_global) and written == cfg


def test_tensors_on_a_full_disk(tmp_path, monkeypatch):
    """What the library raises is no OSError, which commands make a line of."""

    def full(*args, **kwargs):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(write_tensors, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        write_tensors.write_tensors(tmp_path / "x", {"a": np.zeros(3)})


def test_tensors_may_be_read_by_whom_other_files_may(tmp_path):
    (tmp_path / "other").touch()
    write_tensors.write_tensors(tmp_path / "x", {"a": np.arange(3.0)}, {"format": "pt"})
    modes = {(tmp_path / name).stat().st_mode for name in ("x", "other")}
    assert len(modes) == 1
    assert load_file(tmp_path / "x")["a"].tolist() == [0, 1, 2]
