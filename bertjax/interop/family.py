# SPDX-License-Identifier: Apache-2.0
"""Describe a family of Hugging Face models, for reading and for writing.

Each family is a file of families/. Its keys and defaults are those of transformers'
models/*/configuration_*.py, its tensor names those of models/*/modeling_*.py.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Options = dict[str, Any]

# Keys that config.json must have, and transformers' defaults of optional keys.
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
DEFAULTS = {
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
REFUSED = {
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "quantization_config": (None,),
}
PAD = {"pad_token_id": "pad"}
ENDS = {"bos_token_id": "cls", "eos_token_id": "sep", **PAD}
# Endings of the names of transformers' classes for tasks.
SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"
ANSWER, CHOICE = "ForQuestionAnswering", "ForMultipleChoice"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models, which config.json calls `model_type`.

    names: path of our leaf -> name of the tensor, with {} for the number of the layer.
    glu_names: the names that differ if mlp_type is "glu".
    prefix: precedes the encoder's names in files of models with a head.
    class_prefix: begins the names of transformers' classes.
    classes: pretraining heads ("mlm+nsp", "": none) -> ending of the class name; the
        first entry whose heads are all present is used.
    decoder_classes: the same for models with is_decoder; empty if config.json
        has no such key.
    task_heads: ending of the class name -> tensors of a task's head, and of the dense
        layer before it unless that belongs to the encoder there.
    defaults: option of EncoderConfig -> its value if config.json lacks the key.
    renamed: option -> key of config.json, if they differ.
    fixed: options that are the same in the whole family.
    read, write: read(config.json) returns the options, and write(options) the keys,
        that are not copies of each other.
    special_ids: key of config.json -> role of the special piece with that id.
    decoder_start: for encoder-decoders, the role of the decoder's first piece.
    refused: key of config.json that changes the computation -> supported values.
    aliases: another name of a tensor -> its name in `names`.
    ties_by_file: whether files, and not config.json, tell if the head is tied to the
        word embeddings: it is tied unless they have another matrix.
    zeros: paths of leaves that are zero if the files lack them.
    row_vectors: a pattern for names of vectors [n] that are stored as [1, n].
    outside: paths of the encoder that belong to a head there, and have no prefix.
    swapped: a pattern for names of dense weights that are stored as [in, out], not as
        [out, in], as in transformers' Conv1D.
    after_padding: positions begin after the row of the padding piece's id.
    tf1_config: the config file beside a TensorFlow 1 checkpoint.
    tf1_names: a pattern in a name of `names` -> its replacement in such a checkpoint,
        applied in order (tf1.py).
    """

    model_type: str
    names: Mapping[str, str]
    prefix: str
    class_prefix: str
    classes: Mapping[str, str]
    task_heads: Mapping[str, Mapping[str, str]]
    decoder_classes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=lambda: DEFAULTS)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read: Callable[[Options], Options] = lambda raw: {}
    write: Callable[[Options], Options] = lambda options: {}
    special_ids: Mapping[str, str] = dataclasses.field(default_factory=lambda: PAD)
    decoder_start: str = ""
    refused: Mapping[str, tuple[Any, ...]] = dataclasses.field(
        default_factory=lambda: REFUSED
    )
    glu_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ties_by_file: bool = False
    zeros: frozenset[str] = frozenset()
    row_vectors: str = ""
    outside: frozenset[str] = frozenset()
    swapped: str = ""
    after_padding: bool = False
    tf1_config: str = ""
    tf1_names: Mapping[str, str] | None = None

    def names_for(self, mlp_type: str) -> Mapping[str, str]:
        """Return `names` for a model with this type of MLP."""
        return {**self.names, **(self.glu_names if mlp_type == "glu" else {})}

    @property
    def keys(self) -> dict[str, str]:
        """{option of EncoderConfig: key of config.json}."""
        options = dict.fromkeys((*REQUIRED, *self.defaults))
        return {o: self.renamed.get(o, o) for o in options if o not in self.fixed}


def tensors(table: str) -> dict[str, str]:
    """Parse lines of "path name", ours and theirs, into {path of a leaf: tensor}.

    A name that ends in .weight or .bias is a tensor. Other names are a norm if the path
    ends in "norm", and otherwise a dense layer. A name that ends in @1/3 is the second
    third of the tensor's outputs.

    >>> tensors("mlm/norm head.norm")
    {'mlm/norm/scale': 'head.norm.weight', 'mlm/norm/bias': 'head.norm.bias'}
    """
    names = {}
    for line in filter(str.strip, table.splitlines()):
        path, name = line.split()
        if name.endswith((".weight", ".bias")):
            names[path] = name
            continue
        name, at, part = name.partition("@")
        kernel = "scale" if path.endswith("norm") else "kernel"
        names[f"{path}/{kernel}"] = f"{name}.weight{at}{part}"
        names[f"{path}/bias"] = f"{name}.bias{at}{part}"
    return names


def pooled(pooler: str, classes: str = "classifier") -> dict[str, str]:
    """Return the tensors of a head on the pooled vector."""
    return tensors(f"encoder/pooler {pooler}\ntask {classes}")


def task_heads(
    sequence: Mapping[str, str], choice: Mapping[str, str]
) -> dict[str, Mapping[str, str]]:
    """Return the tensors of task heads by the endings of transformers' classes."""
    return {
        SEQUENCE: sequence,
        CHOICE: choice,
        TOKEN: tensors("task classifier"),
        ANSWER: tensors("task qa_outputs"),
    }
