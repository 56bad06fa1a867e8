# SPDX-License-Identifier: Apache-2.0
"""Read the checkpoints in which Google released BERT, ALBERT and ELECTRA.

Names are derived from the family's own. Sizes are read from bert_config.json or
albert_config.json, and for ELECTRA, which has no such file, from the tensors' shapes.
The rest is what google-research/bert, albert and electra compute (modeling.py): norms
with 1e-12, and gelu by tanh, but exact in ELECTRA.
"""

import dataclasses
import glob
import itertools
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bertjax import UserError, join_names
from bertjax.interop import hf_read, read_tensors
from bertjax.interop.families import all_families
from bertjax.interop.family import Family
from bertjax.interop.read_tensors import DTYPES, StoredTensor
from bertjax.interop.tensor_layout import leaves
from bertjax.models.config import EncoderConfig

INDEX = ".index"
# Optimizer slots, counters, and the generator's temperature in training.
IGNORED = re.compile(
    r"(.*/)?(adam_[mv]|lamb_[mv]|Adam|\w*Optimizer|LAMB|beta[12]_power|global_step"
    r"|temperature)(_\d+)?"
)
# A pattern in a family's tensor name -> its replacement in the checkpoint, applied in
# order, after the family's own.
PATTERNS = {
    r"^encoder\.layer\.(\d+)": r"encoder.layer_\1",
    r"LayerNorm\.weight": "LayerNorm.gamma",
    r"LayerNorm\.bias": "LayerNorm.beta",
    r"_embeddings\.weight": "_embeddings",
    r"\.weight": ".kernel",
}
HEADS = ("cls/", "generator_predictions/", "discriminator_predictions/")
SCOPES = ("bert/", "electra/", "generator/")  # of encoders


def name_in_file(name: str, family: Family, scope: str) -> str:
    """Return the name in a checkpoint of a tensor of the table.

    >>> bert = all_families()["bert"]
    >>> name_in_file("encoder.layer.0.output.dense.weight", bert, "bert")
    'bert/encoder/layer_0/output/dense/kernel'
    """
    for pattern, replacement in {**(family.tf1_names or {}), **PATTERNS}.items():
        name = re.sub(pattern, replacement, name)
    name = name.replace(".", "/")
    return name if name.startswith(HEADS) else f"{scope}/{name}"


@dataclasses.dataclass(frozen=True)
class CheckpointTensor(StoredTensor):
    """A tensor of a checkpoint. swapped: it is stored as [in, out], unlike `shape`."""

    reader: Any
    where: str
    name: str
    swapped: bool

    def shape_in_file(self, shape: tuple[int, ...]) -> list[int]:
        return list(shape[::-1] if self.swapped else shape)

    def rows(self, begin: int, end: int) -> np.ndarray:
        try:
            values = self.reader.get_tensor(self.name).astype(np.float32, copy=False)
        except Exception as e:  # tensorflow raises several kinds
            where = f"{self.where}: {self.name}"
            raise UserError(f"{where} cannot be read: {_line(e)}") from e
        return (values.T if self.swapped else values)[begin:end]

    def fill(self, out: np.ndarray, transpose: bool, part: int, of: int) -> None:
        """Read the whole tensor once, because a reader cannot slice."""
        count = self.shape[0] // of
        rows = self.rows(part * count, (part + 1) * count)
        np.copyto(out, (rows.T if transpose else rows).reshape(out.shape))


def is_directory(path: Any) -> bool:
    """Return whether a directory has such a checkpoint, or at least its config."""
    has_config = any((path / name).exists() for name in configs())
    return has_config or any(path.glob(f"*{INDEX}"))


def configs() -> dict[str, Family]:
    """Return the families by the name of the config file beside their checkpoints."""
    return {f.tf1_config: f for f in all_families().values() if f.tf1_config}


def open_models(directory: Path, where: str) -> list[hf_read.Imported]:
    """Open a directory: [model], or ELECTRA's [discriminator, generator].

    Raises UserError, beginning with `where`, if there is no checkpoint or
    several, if it is truncated or lacks tensors, if shapes differ, or if the
    encoder has unknown tensors.
    """
    known = configs()
    config = next((name for name in known if (directory / name).exists()), "")
    raw = read_tensors.read_json(directory / config, where) if config else {}
    prefix = find_prefix(directory, where)
    checkpoint = f"{where}: {prefix.name}"
    stored = read_index(prefix, checkpoint)
    if config:
        family, scopes = known[config], ["bert"]
        act = raw.get("hidden_act", "gelu")
        raw["hidden_act"] = "gelu_new" if act == "gelu" else act
    else:
        family, scopes = all_families()["electra"], ["electra"]
        if any(name.startswith("generator/") for name in stored):
            scopes.append("generator")
    models, unexpected = [], set(stored)
    for scope in scopes:
        sizes = raw if config else electra_sizes(stored, scope, checkpoint)
        sizes |= {"model_type": family.model_type, "layer_norm_eps": 1e-12}
        cfg = hf_read.read_config(sizes, family, f"{where}: {config or prefix.name}")
        names = _names_in_file(family, cfg, scope, scopes, stored)
        tensors = {n: stored[own] for n, own in names.items() if own in stored}
        unexpected.difference_update(names.values())
        model = hf_read.Imported(directory, where, family, sizes, cfg, tensors)
        source = config or "each other"
        models.append(hf_read.check_tensors(model, source, names.__getitem__))
    if unknown := [n for n in sorted(unexpected) if n.startswith(SCOPES)]:
        raise UserError(
            f"{checkpoint}: tensors of the encoder that {family.model_type} as "
            f"{config or 'their shapes'} has it does not know: {join_names(unknown, 6)}"
        )
    models[0] = dataclasses.replace(models[0], unexpected=tuple(sorted(unexpected)))
    return models


def _names_in_file(
    family: Family,
    cfg: EncoderConfig,
    scope: str,
    scopes: list[str],
    stored: Mapping[str, CheckpointTensor],
) -> dict[str, str]:
    """Return {the family's name: the checkpoint's name} for the tensors of a scope."""
    names = {}
    tensors = (leaf.tensors for leaf in leaves(family, cfg).values())
    for name, *_ in itertools.chain.from_iterable(tensors):
        own = name_in_file(name, family, scope)
        if len(scopes) > 1 and own.startswith(HEADS):
            # Each half has its own head.
            if own.startswith("generator") != (scope == "generator"):
                continue
        elif own not in stored and name.startswith("embeddings."):
            own = name_in_file(name, family, scopes[0])  # shared
        names[name] = own
    return names


def find_prefix(directory: Path, where: str) -> Path:
    """Return the path of the only checkpoint, or of the one that `checkpoint` names."""
    names = sorted(p.name.removesuffix(INDEX) for p in directory.glob(f"*{INDEX}"))
    if not names:
        raise UserError(f"{where} holds no checkpoint (a file NAME{INDEX})")
    name = names[0]
    if len(names) > 1:
        state = directory / "checkpoint"
        text = state.read_text("utf-8", "replace") if state.is_file() else ""
        line = re.search(r'^model_checkpoint_path: *"(.*)"', text, re.MULTILINE)
        name = re.split(r"[/\\]", line[1])[-1] if line else ""
    if name not in names:
        raise UserError(
            f"{where} holds {len(names)} checkpoints ({join_names(names, 6)}), and "
            "no file `checkpoint` that names one of them"
        )
    for file in directory.glob("*"):
        if file.name.startswith((name + INDEX, name + ".data-")):
            read_tensors.inside(directory, file.name, where)
    return directory / name


def read_index(prefix: Path, where: str) -> dict[str, CheckpointTensor]:
    """Return the tensors of a checkpoint by name, without optimizer slots.

    Raises UserError if the files are truncated or not a checkpoint.
    """
    for name, value in (("TF_CPP_MIN_LOG_LEVEL", "3"), ("TF_ENABLE_ONEDNN_OPTS", "0")):
        os.environ.setdefault(name, value)  # tensorflow prints while it is imported
    try:
        import tensorflow as tf
    except ImportError as e:
        raise UserError(f"{where} needs tensorflow to be read ({_line(e)})") from e
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        shapes = reader.get_variable_to_shape_map()
        types = reader.get_variable_to_dtype_map()
    except Exception as e:  # tensorflow raises several kinds
        raise UserError(f"{where}{INDEX} cannot be read: {_line(e)}") from e
    least = sum(math.prod(s) * types[n].size for n, s in shapes.items())
    parts = prefix.parent.glob(f"{glob.escape(prefix.name)}.data-*")
    size = sum(part.stat().st_size for part in parts)
    if size < least:
        raise UserError(
            f"{where}.data-* are cut short or lack a part: {size:,} bytes of at least "
            f"{least:,}"
        )
    codes = {dtype: code for code, dtype in DTYPES.items()}
    tensors = {}
    for name, shape in shapes.items():
        if IGNORED.fullmatch(name):
            continue
        swapped = name.endswith("/kernel") and len(shape) == 2
        shape = tuple(shape[::-1] if swapped else shape)
        dtype = codes.get(types[name].as_numpy_dtype, types[name].name)
        tensors[name] = CheckpointTensor(dtype, shape, reader, where, name, swapped)
    return tensors


def electra_sizes(
    stored: Mapping[str, CheckpointTensor], scope: str, where: str
) -> dict[str, Any]:
    """Return ELECTRA's sizes, derived from its tensors, as a config.json.

    Heads are 64 wide, as in google-research/electra, util/training_utils.py; its gelu
    is the exact one.
    """

    def shape(name: str) -> tuple[int, ...]:
        tensor = stored.get(name)
        if tensor is None or len(tensor.shape) != 2:
            raise UserError(
                f"{where} has no matrix {name}, and the directory no "
                f"{' or '.join(configs())}"
            )
        return tensor.shape

    own = f"{scope}/embeddings/"
    if own + "word_embeddings" not in stored:
        own = "electra/embeddings/"
    rows, width = shape(own + "word_embeddings")
    inner, hidden = shape(f"{scope}/encoder/layer_0/intermediate/dense/kernel")
    layer = re.compile(rf"{scope}/encoder/layer_(\d+)/")
    layers = {int(m[1]) for m in map(layer.match, stored) if m}
    return {
        "vocab_size": rows,
        "embedding_size": width,
        "hidden_size": hidden,
        "num_hidden_layers": max(layers) + 1,
        "num_attention_heads": max(1, hidden // 64),
        "intermediate_size": inner,
        "hidden_act": "gelu",
        "max_position_embeddings": shape(own + "position_embeddings")[0],
        "type_vocab_size": shape(own + "token_type_embeddings")[0],
    }


def _line(e: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(e).strip().splitlines() or [type(e).__name__])[0]
