# SPDX-License-Identifier: Apache-2.0
"""Write models as Hugging Face's: config.json and model.safetensors."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from bertjax import UserError
from bertjax.interop import tensor_files
from bertjax.interop.families import all_families
from bertjax.interop.family import Family
from bertjax.interop.hf_read import CONFIG, few, read_config
from bertjax.interop.task_heads import (
    CLASSES,
    OPTIONS,
    check_head,
    tell_task,
    with_head,
)
from bertjax.interop.tensor_layout import (
    heads_of,
    is_transposed,
    leaves,
    names_of,
    split_name,
    stored_shape,
    walk,
)
from bertjax.models.config import RUNTIME, EncoderConfig

# What does not decide which family an encoder is of.
FREE = ("pooler", "dtype", "pieces", *RUNTIME, *OPTIONS)
SAME_GELU = {"gelu_tanh": "gelu_pytorch_tanh", "gelu_new": "gelu_pytorch_tanh"}


def write_model(
    directory: Path,
    params: Mapping[str, Any],
    cfg: EncoderConfig,
    roles: Mapping[str, int],
    model_type: str = "bert",
    raw: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda text: None,
    labels: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and model.safetensors into an existing directory.

    params: our tree (numpy); roles: role -> id of the special pieces; model_type: tried
    first; raw: the config.json that the model was once imported with, whose other keys
    are kept; labels: names of the classes of a task's head; more: keys of config.json
    that only bertjax reads. Says which parameters have no place there. Raises UserError
    when no family has such an encoder, or task.
    """
    ours = cfg
    family, cfg, config = choose_family(ours, roles, model_type)
    if raw and raw.get("model_type") == family.model_type:
        config = {**raw, **config}
    have = dict(walk(params))
    task = next((head for head in CLASSES if head in params), "")
    if task or "pooler" in params["encoder"]:
        check_head(family, cfg, read_config(config, family, CONFIG))
    if task:
        family = with_head(family, task)
        config |= tell_task(task, labels)
    if cfg.type_vocab_size and "encoder/embeddings/token_type" not in have:
        # No token types: one, of zeros.
        types = np.zeros((cfg.type_vocab_size, cfg.embedding_width), np.float32)
        have["encoder/embeddings/token_type"] = types
    if cfg.position_offset != ours.position_offset:  # the rows before it are unused
        path = "encoder/embeddings/position"
        used = np.asarray(have[path])[ours.position_offset :]
        unused = np.zeros((cfg.position_offset, used.shape[1]), np.float32)
        have[path] = np.concatenate([unused, used])
    here = [p for p in leaves(family, cfg) if p in have]
    if left := sorted(have.keys() - set(here)):
        say(f"not written, {family.model_type} has no such tensors: {few(left, 12)}")
    heads = heads_of(here)
    end = next(
        end
        for needed, end in family.classes.items()
        if heads.issuperset(filter(None, needed.split("+")))
    )
    config |= {
        "architectures": [family.class_prefix + end],
        "dtype": "float32",
        **(more or {}),
    }
    for key in ("torch_dtype", "num_labels"):
        config.pop(key, None)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (directory / CONFIG).write_text(text, "utf-8")
    stored = _stored(have, here, family, cfg, bool(heads))
    save_file(stored, directory / tensor_files.SINGLE, metadata={"format": "pt"})
    # safetensors lets the owner alone read what it writes.
    shutil.copymode(directory / CONFIG, directory / tensor_files.SINGLE)


def choose_family(
    cfg: EncoderConfig, roles: Mapping[str, int], model_type: str
) -> tuple[Family, EncoderConfig, dict[str, Any]]:
    """Return the family whose config.json, read back, gives this encoder.

    With it the config (with one token type where the family cannot have none, with
    positions that begin where the family's do) and config.json. `model_type` is tried
    first. Raises UserError when there is none.
    """
    known = all_families()
    order = {model_type: known.get(model_type), **known}
    for family in filter(None, order.values()):
        typed = "type_vocab_size" in family.keys
        wanted = cfg
        if typed and not cfg.type_vocab_size:
            wanted = dataclasses.replace(cfg, type_vocab_size=1)
        try:
            if family.after_padding and cfg.position_embedding_type == "absolute":
                wanted = _with_offset(wanted, roles["pad"] + 1)
            config = config_json(wanted, family, roles)
            back = read_config(config, family, CONFIG)
        except UserError:
            continue
        if _comparable(back) == _comparable(wanted):
            return family, wanted, config
    raise UserError(
        "--format=hf: no family of Hugging Face's has such an encoder; known are "
        + ", ".join(known)
    )


def _with_offset(cfg: EncoderConfig, offset: int) -> EncoderConfig:
    """Return the config with positions of as many tokens from this row on."""
    rows = cfg.max_length + offset
    return dataclasses.replace(
        cfg, position_offset=offset, max_position_embeddings=rows
    )


def _comparable(cfg: EncoderConfig) -> dict[str, Any]:
    told = {k: v for k, v in dataclasses.asdict(cfg).items() if k not in FREE}
    told["hidden_act"] = SAME_GELU.get(cfg.hidden_act, cfg.hidden_act)
    act = cfg.classifier_activation or cfg.hidden_act
    told["classifier_activation"] = SAME_GELU.get(act, act)
    if not cfg.local_attention or cfg.position_embedding_type != "rope":
        told["local_rope_theta"] = 0
    told["num_hidden_groups"] = cfg.num_hidden_groups or cfg.num_hidden_layers
    return told


def config_json(
    cfg: EncoderConfig, family: Family, roles: Mapping[str, int]
) -> dict[str, Any]:
    """Return what this family's config.json says of an encoder."""
    options = dataclasses.asdict(cfg)
    if options["hidden_act"] == "gelu_tanh":
        options["hidden_act"] = "gelu_new"
    options["classifier_activation"] = (
        cfg.classifier_activation or options["hidden_act"]
    )
    return {
        "model_type": family.model_type,
        **{key: roles[role] for key, role in family.special_ids.items()},
        **{key: options[option] for option, key in family.keys.items()},
        **family.write(options),
    }


def _stored(
    leaves_by_path: Mapping[str, Any],
    paths: list[str],
    family: Family,
    cfg: EncoderConfig,
    prefixed: bool,
) -> dict[str, np.ndarray]:
    """Return the family's tensors by name, f32."""
    parts: dict[str, dict[int, np.ndarray]] = {}
    for path in paths:
        leaf = np.asarray(leaves_by_path[path])
        slots = leaf if "{}" in family.names[path] else leaf[None]
        shape = stored_shape(path, cfg, leaf.shape[-1])
        inside = path.startswith("encoder/") and path not in family.outside
        prefix = family.prefix if inside and prefixed else ""
        for slot, full in zip(slots, names_of(path, family, cfg), strict=True):
            name, part, _ = split_name(full)
            swap = is_transposed(path)
            tensor = slot.reshape(shape[::-1]).T if swap else slot.reshape(shape)
            parts.setdefault(prefix + name, {})[part] = tensor
    if not cfg.tie_word_embeddings:  # then each name is a tensor of its own
        for other, name in family.aliases.items():
            if name in parts:
                parts[other] = parts[name]
    # Contiguous, since safetensors writes memory as it lies.
    return {
        name: np.ascontiguousarray(
            np.concatenate([tensors[i] for i in range(len(tensors))]), "<f4"
        )
        for name, tensors in parts.items()
    }
