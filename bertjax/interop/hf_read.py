# SPDX-License-Identifier: Apache-2.0
"""Read models from Hugging Face directories: config.json and tensors.

families/ has the names, by which files become our stacked leaves, without
torch and transformers.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bertjax import UserError, counted, join_names
from bertjax.interop import read_tensors
from bertjax.interop import tensor_layout as layout
from bertjax.interop.families import all_families
from bertjax.interop.family import Family
from bertjax.interop.read_tensors import (
    DTYPES,
    RowTensor,
    StoredTensor,
    SwappedTensor,
    ZeroTensor,
    are_equal,
)
from bertjax.interop.task_heads import Task, read_task, with_head
from bertjax.models.config import EncoderConfig

CONFIG = "config.json"
# Buffers, not parameters, that some versions of transformers store.
BUFFERS = re.compile(
    r"(.*\.)?(position_ids|token_type_ids|inv_freq|attn\.(masked_)?bias"
    # T5's release has a table that its cross-attention does not use.
    r"|EncDecAttention\.relative_attention_bias\.weight)"
)
MOST_LAYERS = 10_000
# Other names of activations in config.json -> our names for the same functions.
ACTIVATIONS = {"gelu_python": "gelu", "gelu_fast": "gelu_pytorch_tanh", "swish": "silu"}
# with so many rows beyond the vocabulary, the model is another vocabulary's
PADDING = 128


@dataclasses.dataclass(frozen=True)
class Imported:
    """An imported model: its family, sizes, and the places of its tensors.

    where: begins every message. raw: config.json. tensors: by their names in the
    family; leaves: our leaves that the files have, by path; missing: those that they
    lack (heads, pooler); unexpected: tensors that match no leaf. task: what it was
    finetuned for.
    """

    directory: Path
    where: str
    family: Family
    raw: dict[str, Any]
    cfg: EncoderConfig
    tensors: Mapping[str, StoredTensor]
    leaves: Mapping[str, layout.Leaf] = dataclasses.field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    task: Task | None = None

    def __str__(self) -> str:
        return str(self.directory)

    @property
    def heads(self) -> frozenset[str]:
        """The heads that the files have: "mlm", "nsp", ..."""
        return layout.heads_of(self.leaves) | layout.bare_heads(self.family, self.cfg)

    def describe(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the leaves by path."""
        return {path: leaf.shape for path, leaf in self.leaves.items()}

    def read(self, path: str) -> np.ndarray:
        """Read one leaf as f32, with the layers stacked."""
        leaf = self.leaves[path]
        # Uninitialized, and aligned so that jax can use it on a CPU without a copy.
        size = 4 * math.prod(leaf.shape)
        memory = np.empty(size + 64, np.uint8)
        start = -memory.ctypes.data % 64
        out = memory[start : start + size].view(np.float32).reshape(leaf.shape)
        slots = out if leaf.is_stacked else out[None]
        for slot, (name, part, parts) in zip(slots, leaf.tensors, strict=True):
            self.tensors[name].fill(slot, leaf.is_transposed, part, parts)
        return out

    def params(self) -> dict[str, Any]:
        """Read all parameters into their final places: a nested dict of f32 arrays."""
        heads = {head: {} for head in layout.bare_heads(self.family, self.cfg)}
        return layout.unflatten((p, self.read(p)) for p in self.leaves) | heads

    def report(self, say: Callable[[str], None]) -> None:
        """Report what was matched and what is not used."""
        layers, width = self.cfg.num_hidden_layers, self.cfg.hidden_size
        shape = f"{counted(layers, 'layer')} of {width}"
        if decoder := self.cfg.num_decoder_layers:
            shape = f"{layers} + {counted(decoder, 'layer')} of {width}"
        matched = f"{len(self.leaves)} parameters matched"
        say(f"{self.where}: {self.family.model_type}, {shape}; {matched}")
        if self.unexpected:
            say(f"in the files, not used: {join_names(self.unexpected, 12)}")


def open_model(directory: Path, where: str) -> Imported:
    """Open a directory: read config.json and the headers of the tensors.

    Raises UserError, beginning with `where` (flag=value), for an unknown or damaged
    config, for tensors that are missing or have other shapes, and if only config.json
    says that the head is tied.
    """
    raw = read_tensors.read_json(read_tensors.inside(directory, CONFIG, where), where)
    if not isinstance(raw.get("model_type"), str):
        raise UserError(f"{where}: {CONFIG} lacks model_type")
    family = all_families().get(raw["model_type"])
    if family is None:  # no hint at a misspelling, since a program wrote it
        raise UserError(
            f"{where}: models with model_type={raw['model_type']!r} cannot be read; "
            f"those that can: {', '.join(sorted(all_families()))}"
        )
    cfg = read_config(raw, family, f"{where}: {CONFIG}")
    if task := read_task(raw, f"{where}: {CONFIG}"):
        family = with_head(family, task.head, where=f"{where}: ")
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in read_tensors.open_tensors(directory, where).items():
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        if BUFFERS.fullmatch(name):
            continue
        name = name.removeprefix(family.prefix)
        if re.fullmatch(family.swapped, name):
            tensor = SwappedTensor.of(tensor)
        if re.fullmatch(family.row_vectors, name) and tensor.shape[:1] == (1,):
            tensor = RowTensor.of(tensor)
        tensors[name] = tensor
    cfg = _join_tied(tensors, family, cfg, where)
    for path in family.zeros & layout.leaves(family, cfg).keys():
        shape = layout.leaves(family, cfg)[path].stored_shape
        tensors.setdefault(family.names[path], ZeroTensor("F32", shape))
    model = Imported(directory, where, family, raw, cfg, tensors, task=task)
    return check_tensors(model)


def _join_tied(
    tensors: dict[str, StoredTensor], family: Family, cfg: EncoderConfig, where: str
) -> EncoderConfig:
    """Rename tensors with several names to the family's names, in place.

    Returns the config; in a family with ties_by_file it is tied as the files are.
    Raises UserError if tensors differ that config.json ties, or that are one here.
    """
    word, head = (
        family.names.get(p, "") for p in ("encoder/embeddings/word", "mlm/decoder")
    )
    if family.ties_by_file:
        _check_fit(_odd_types(tensors, {word, head}), where)
        apart = head in tensors and not (
            word in tensors and are_equal(tensors[head], tensors[word])
        )
        apart = apart or (head in tensors and not cfg.tie_word_embeddings)
        cfg = dataclasses.replace(cfg, tie_word_embeddings=not apart)
    same = dict(family.aliases)
    if cfg.tie_word_embeddings and head:
        same[head] = word
    for other, name in same.items():
        if other not in tensors:
            continue
        # the same table under the name of the encoder or decoder
        is_word = other != head and name == word
        if (cfg.tie_word_embeddings or is_word) and name in tensors:
            _check_fit(_odd_types(tensors, {other, name}), where)
            if not are_equal(tensors[other], tensors[name]):
                why = "which are one table here"
                if not is_word:
                    why = f"though {CONFIG} ties them: tie_word_embeddings should be "
                    why += "false"
                raise UserError(f"{where}: {other} differs from {name}, {why}")
        # Use the matrix of the other name, with which transformers 5 computes.
        tensors[name] = tensors.pop(other)
    return cfg


def _odd_types(tensors: Mapping[str, StoredTensor], names: set[str]) -> list[str]:
    """Return the `names` whose type parameters cannot have, with that type."""
    types = {name: tensors[name].dtype for name in sorted(names & tensors.keys())}
    return [f"{name} of type {t}" for name, t in types.items() if t not in DTYPES]


def check_tensors(
    model: Imported, config: str = CONFIG, name_in_file: Callable[[str], str] = str
) -> Imported:
    """Return the model with its leaves, missing parts and unexpected tensors.

    config: the source of the sizes; name_in_file: converts a family's tensor name; both
    are for messages. Raises UserError like `open_model`.
    """
    family, tensors, where = model.family, model.tensors, model.where
    classes = model.task.classes if model.task else 2
    leaves = layout.leaves(family, model.cfg, classes)
    known, absent, lost, wrong = set(), set(), [], []
    for path, leaf in leaves.items():
        for name, _, parts in leaf.tensors:
            known.add(name)
            rows, *rest = leaf.stored_shape
            shape = (parts * rows, *rest)
            tensor = tensors.get(name)
            if tensor is None:
                absent.add(_part_of(path))
                if _part_of(path) in layout.STACKS or model.task:
                    lost.append(name_in_file(name))
            elif tensor.shape != shape:
                has, needs = map(tensor.shape_in_file, (tensor.shape, shape))
                wrong.append(f"{name_in_file(name)} {has}, not {needs}")
            elif tensor.dtype not in DTYPES:
                wrong.append(f"{name_in_file(name)} of type {tensor.dtype}")
    if lost:
        raise UserError(f"{where} lacks {join_names(lost, 6)}")
    _check_fit(wrong, where, config)
    unexpected = sorted(tensors.keys() - known)
    names = family.names_for(model.cfg.mlp_type).values()
    inner = {n.split("{}")[0] for n in names if "{}" in n}
    if strange := [n for n in unexpected if n.startswith(tuple(inner))]:
        raise UserError(
            f"{where}: tensors of layers that {config} does not have: "
            f"{join_names(strange, 6)}"
        )
    # An incomplete head counts as missing.
    missing = tuple(path for path in leaves if _part_of(path) in absent)
    return dataclasses.replace(
        model,
        leaves={path: leaf for path, leaf in leaves.items() if path not in missing},
        missing=missing,
        unexpected=tuple(unexpected),
    )


def _part_of(path: str) -> str:
    """Return what may be missing as a whole (a head or the pooler), or a stack."""
    return "pooler" if "/pooler/" in path else path.split("/")[0]


def _check_fit(wrong: list[str], where: str, config: str = CONFIG) -> None:
    if wrong:
        raise UserError(
            f"{where}: tensors that do not fit {config}: {join_names(wrong, 6)}"
        )


def read_config(raw: Mapping[str, Any], family: Family, where: str) -> EncoderConfig:
    """Read a config.json of this family. Raises UserError that names the key."""
    kinds = {f.name: f.type for f in dataclasses.fields(EncoderConfig)}
    options = dict(family.fixed)
    for option, key in family.keys.items():
        value = raw.get(key)
        if value is None and option not in family.defaults:
            raise UserError(f"{where} lacks {key}")
        value = family.defaults[option] if value is None else value
        kind = kinds[option]
        if kind is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if type(value) is not kind:
            raise UserError(f"{where}: {key}={value!r} is no {kind.__name__}")
        if option in ("hidden_act", "classifier_activation"):
            value = ACTIVATIONS.get(value, value)
        options[option] = value
    if options["num_hidden_layers"] > MOST_LAYERS:
        key = family.keys["num_hidden_layers"]
        raise UserError(f"{where}: {key}={raw[key]} is more than {MOST_LAYERS}")
    for key, known in family.refused.items():
        if raw.get(key) not in known:
            raise UserError(f"{where}: {key}={raw[key]!r} is not supported")
    try:
        options |= family.read(dict(raw))
        return EncoderConfig(**options)
    except UserError as e:
        message = str(e)
        for option, key in family.keys.items():
            message = re.sub(rf"\bmodel\.{option}\b", key, message)
        raise UserError(f"{where}: {message}") from e
    except ValueError as e:
        raise UserError(f"{where}: {e} is not supported") from e
    except (TypeError, AttributeError) as e:
        raise UserError(f"{where} has a value of another kind ({e})") from e


def check_tokenizer(
    model: Imported, tokenizer: Any, say: Callable[[str], None] = lambda text: None
) -> None:
    """Refuse a tokenizer that is not the model's, by its size and special pieces.

    The ids must agree if the model computes with them (RoBERTa's positions begin after
    the padding's id). Otherwise `say` reports a difference, because published
    config.json files often differ from their tokenizers. tokenizer: has vocab_size,
    roles, pieces, kind and lower_case, as in bertjax/data/tokenizers/tokenizer.py.
    Raises UserError.
    """
    rows, pieces = model.cfg.vocab_size, tokenizer.vocab_size
    if pieces > rows or rows - pieces >= PADDING:
        raise UserError(
            f"{model.where}: the tokenizer has {pieces:,} pieces, the model {rows:,} "
            "rows of embeddings: one of them is another model's"
        )
    for key, role in model.family.special_ids.items():
        value, id_ = model.raw.get(key), tokenizer.roles[role]
        if value is not None and value != id_:
            message = f"{model.where}: {CONFIG} has {key}={value}, the tokenizer's "
            message += f"{tokenizer.pieces[id_]} is {id_}"
            if role == "pad" and model.family.after_padding:
                raise UserError(f"{message}: one of them is another model's")
            which = ", which counts"
            if model.cfg.num_decoder_layers:
                which = f"; texts are generated with {value}"
            say(message + which)
    if tokenizer.kind != "wordpiece":
        return
    capitals = sum(p != p.lower() and p[:1] not in "[<" for p in tokenizer.pieces)
    words = sum(bool(re.fullmatch("[a-z]{2,}", p)) for p in tokenizer.pieces)
    if tokenizer.lower_case and capitals > pieces / 10:
        raise UserError(
            f"{model.where}: the tokenizer lower-cases, but {capitals:,} of its "
            f"{pieces:,} pieces hold capitals: do_lower_case should be false"
        )
    # bert-base-chinese, with 2,000 words in 21,000 pieces, does not lower-case.
    if not tokenizer.lower_case and not capitals and words > max(1000, pieces / 4):
        raise UserError(
            f"{model.where}: the tokenizer does not lower-case, but {words:,} of its "
            f"{pieces:,} pieces are words and none has a capital: do_lower_case "
            "should be true"
        )
