# SPDX-License-Identifier: Apache-2.0
"""Write models in Hugging Face's format: config.json and model.safetensors."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertjax import UserError, join_names
from bertjax.interop import read_tensors, task_heads
from bertjax.interop import tensor_layout as layout
from bertjax.interop.families import all_families
from bertjax.interop.family import Family
from bertjax.interop.generation_config import (
    GenerationSettings,
    from_roles,
    write_generation_config,
)
from bertjax.interop.hf_read import CONFIG, read_config
from bertjax.interop.write_tensors import write_tensors
from bertjax.models.config import RUNTIME, EncoderConfig

# Options that no class of transformers supports.
OURS_ALONE = ("qk_norm", "final_logit_softcapping")
OURS_ALONE += ("embedding_skip", "value_skip", "unet_skips")
# Options that do not decide an encoder's family.
FREE = ("pooler", "dtype", "pieces", "zero_init_outputs", "fan_in_init")
FREE += (*RUNTIME, *task_heads.OPTIONS)
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
    hf_class: str = "",
    generation: GenerationSettings | None = None,
    tensors: bool = True,
) -> None:
    """Write config.json and model.safetensors into an existing directory.

    A model that generates texts, a causal LM or an encoder-decoder, also gets
    generation_config.json.

    params: our tree (numpy); roles: role -> id of the special pieces; model_type: tried
    first; raw: the config.json with which the model was imported, whose other keys are
    kept; labels: names of a task's classes; more: keys of config.json that only bertjax
    reads; hf_class: ending of the name of the class for a task's head that
    task_heads.CLASSES lacks (TaskType.hf_class); generation: ids that came with the
    model, which take precedence over `roles` in an encoder-decoder's config.json;
    tensors: False leaves model.safetensors out. Reports parameters that cannot be
    stored. Raises UserError if no family has such an encoder or task.
    """
    family, written, config = choose_family(cfg, roles, model_type)
    if raw and raw.get("model_type") == family.model_type:
        config = {**raw, **config}
    task = next((head for head in task_heads.CLASSES if head in params), "")
    if hf_class:
        task = next(name for name in params if name != "encoder")
    if task or "pooler" in params["encoder"]:
        task_heads.check_head(family, written, read_config(config, family, CONFIG))
    if task:
        family = task_heads.with_head(family, task, hf_class)
        hf_class = hf_class or task_heads.CLASSES[task]
        config |= task_heads.task_config(hf_class, labels)
    ours = dict(layout.walk(params))
    _adapt_embeddings(ours, cfg, written)
    known = layout.leaves(family, written, classes=-1)  # -1: reshape infers it
    leaves = {path: leaf for path, leaf in known.items() if path in ours}
    if left := sorted(ours.keys() - leaves.keys()):
        names = join_names(left, 12)
        say(f"not written, {family.model_type} has no such tensors: {names}")
    heads = layout.heads_of(leaves) | layout.bare_heads(family, written)
    is_causal = written.is_decoder and not task
    classes = (is_causal and family.decoder_classes) or family.classes
    class_name = next(
        family.class_prefix + ending
        for needed, ending in classes.items()
        if heads.issuperset(filter(None, needed.split("+")))
    )
    config |= {"architectures": [class_name], "dtype": "float32", **(more or {})}
    for key in ("torch_dtype", "num_labels"):
        config.pop(key, None)
    ids = (generation or GenerationSettings()).filled(
        from_roles(roles, family.decoder_start)
    )
    if written.num_decoder_layers:  # an absent key would mean another id there
        values = ids.to_json()
        config |= {key: values.get(key) for key in ids._fields if key in config}
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (directory / CONFIG).write_text(text, "utf-8")
    if is_causal or written.num_decoder_layers:
        write_generation_config(directory, ids)
    if not tensors:
        return
    by_name = _tensors(ours, leaves, family, written, not heads)
    write_tensors(directory / read_tensors.SINGLE, by_name, {"format": "pt"})


def _adapt_embeddings(
    ours: dict[str, Any], cfg: EncoderConfig, written: EncoderConfig
) -> None:
    """Adapt the token types and positions in `ours`, which are as in `cfg`."""
    if written.type_vocab_size and not cfg.type_vocab_size:
        types = np.zeros((written.type_vocab_size, cfg.embedding_width), np.float32)
        ours["encoder/embeddings/token_type"] = types
    # the rows before the offset are unused
    if written.position_offset != cfg.position_offset:
        path = "encoder/embeddings/position"
        used = np.asarray(ours[path])[cfg.position_offset :]
        ours[path] = np.pad(used, [(written.position_offset, 0), (0, 0)])


def choose_family(
    cfg: EncoderConfig, roles: Mapping[str, int], model_type: str
) -> tuple[Family, EncoderConfig, dict[str, Any]]:
    """Return the family whose config.json reproduces this encoder when read back.

    Also returns the encoder's config as written (with one token type if the family
    needs one, and with positions that begin where the family's do) and config.json.
    `model_type` is tried first. Raises UserError if no family fits.
    """
    for name in OURS_ALONE:
        if value := getattr(cfg, name):
            raise UserError(
                f"--format=hf: model.{name}={value}: no class of transformers computes "
                "that; commands of bertjax take the workdir itself"
            )
    known = all_families()
    order = {model_type: known.get(model_type), **known}
    others: dict[str, list[str]] = {}  # how each family differs
    for family in filter(None, order.values()):
        written = cfg
        if "type_vocab_size" in family.keys and not cfg.type_vocab_size:
            written = dataclasses.replace(cfg, type_vocab_size=1)
        try:
            if family.after_padding and cfg.position_embedding_type == "absolute":
                offset = roles["pad"] + 1
                rows = dict(max_position_embeddings=cfg.max_length + offset)
                written = dataclasses.replace(written, position_offset=offset, **rows)
            options = dataclasses.asdict(written)
            if written.hidden_act == "gelu_tanh":
                options["hidden_act"] = "gelu_new"
            act = options["classifier_activation"] or options["hidden_act"]
            options["classifier_activation"] = act
            config = {
                "model_type": family.model_type,
                **{key: roles[role] for key, role in family.special_ids.items()},
                **{key: options[option] for option, key in family.keys.items()},
                **family.write(options),
            }
            back = read_config(config, family, CONFIG)
        except UserError:
            continue
        own, theirs = _comparable(written), _comparable(back)
        differ = [f"model.{k}={theirs[k]}" for k in own if own[k] != theirs[k]]
        if not differ:
            return family, written, config
        others[family.model_type] = differ
    nearest = min(others, key=lambda name: len(others[name]), default="")
    raise UserError(
        "--format=hf: no family of Hugging Face's has such an encoder; known are "
        + ", ".join(known)
        + f"; the nearest, {nearest}, has {join_names(others.get(nearest, []), 4)}"
        * bool(nearest)
    )


def _comparable(cfg: EncoderConfig) -> dict[str, Any]:
    options = {k: v for k, v in dataclasses.asdict(cfg).items() if k not in FREE}
    options["hidden_act"] = SAME_GELU.get(cfg.hidden_act, cfg.hidden_act)
    act = cfg.classifier_activation or cfg.hidden_act
    options["classifier_activation"] = SAME_GELU.get(act, act)
    if not cfg.local_attention or cfg.position_embedding_type != "rope":
        options["local_rope_theta"] = 0
    options["num_hidden_groups"] = cfg.num_hidden_groups or cfg.num_hidden_layers
    return options


def _tensors(
    ours: Mapping[str, Any],
    leaves: Mapping[str, layout.Leaf],
    family: Family,
    cfg: EncoderConfig,
    headless: bool,
) -> dict[str, np.ndarray]:
    """Convert leaves by path to the family's tensors by name, f32.

    headless: the class has no head, so names have no prefix.
    """
    stored: dict[str, dict[int, np.ndarray]] = {}
    for path, leaf in leaves.items():
        values, shape = np.asarray(ours[path]), leaf.stored_shape
        slots = values if leaf.is_stacked else values[None]
        is_head = path.split("/")[0] not in layout.STACKS
        outside = headless or path in family.outside or is_head
        prefix = "" if outside else family.prefix
        for slot, (name, part, _) in zip(slots, leaf.tensors, strict=True):
            swap = leaf.is_transposed
            tensor = slot.reshape(shape[::-1]).T if swap else slot.reshape(shape)
            stored.setdefault(prefix + name, {})[part] = tensor
    # If embeddings are not tied, each name gets its own tensor.
    if not cfg.tie_word_embeddings and not family.ties_by_file:
        stacks = "" if headless else family.prefix
        for other, name in family.aliases.items():
            for begin in {"", stacks}:
                if begin + name in stored:
                    stored[begin + other] = stored[begin + name]
    tensors = {}
    for name, parts in stored.items():
        tensor = np.concatenate([parts[i] for i in sorted(parts)])
        if re.fullmatch(family.swapped, name.removeprefix(family.prefix)):
            tensor = tensor.T
        if re.fullmatch(family.row_vectors, name):
            tensor = tensor[None]
        # safetensors writes memory as it is, so tensors must be contiguous.
        tensors[name] = np.ascontiguousarray(tensor, "<f4")
    return tensors
