# SPDX-License-Identifier: Apache-2.0
"""What there is to know about a family of Hugging Face's, for both directions.

Each family is a file of families/. Its keys and defaults are those of transformers'
models/*/configuration_*.py, its names of tensors those of models/*/modeling_*.py.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Options = dict[str, Any]

# What config.json must have, and transformers' defaults of what it may lack.
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
# What ends the names of transformers' classes for tasks.
SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"
ANSWER, CHOICE = "ForQuestionAnswering", "ForMultipleChoice"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What config.json calls `model_type`.

    names: path of a leaf of ours -> name of the tensor, {} for the layer's number.
    glu_names: those that are others where mlp_type is "glu".
    prefix: stands before the encoder's names in files of models with a head.
    class_prefix: begins the names of transformers' classes. classes: pretraining heads
    ("mlm+nsp", "": none) -> what ends the name; the first whose heads are all there
    counts. decoder_classes: the same of models with is_decoder; empty where config.json
    knows no such key. task_heads: what ends the name -> tensors of a task's head, and
    of the dense layer before it where that is no part of the encoder there.
    defaults: option of EncoderConfig -> its value where config.json lacks the key.
    renamed: option -> key of config.json, where the key has another name. fixed:
    options that all of the family have. read(config.json), write(options): options,
    and keys, that are no copies of each other.
    special_ids: key of config.json -> role of the special piece whose id it is.
    decoder_start: the role of the piece that the decoder gets first, of
    encoder-decoders.
    refused: key of config.json that changes what is computed -> values that are known.
    aliases: a tensor's other name -> its name in `names`.
    ties_by_file: whether files, and not config.json, say that the head is the word
    embeddings: it is unless they have another matrix.
    zeros: paths of leaves that are zeros where files lack them. row_vectors: a pattern
    of names of vectors [n] that are [1, n] there.
    outside: paths of the encoder that are part of a head there: without the prefix.
    swapped: a pattern of names of dense layers' weights that are [in, out] there, not
    [out, in], as in transformers' Conv1D.
    after_padding: positions begin after the row of the padding piece's id.
    tf1_config: the file beside a TensorFlow 1 checkpoint. tf1_names: a pattern in a
    name of `names` -> what stands there in such a checkpoint, in order (tf1.py).
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
        """Return `names` of a model with such an MLP."""
        return {**self.names, **(self.glu_names if mlp_type == "glu" else {})}

    @property
    def keys(self) -> dict[str, str]:
        """Option of EncoderConfig -> key of config.json."""
        options = dict.fromkeys((*REQUIRED, *self.defaults))
        return {o: self.renamed.get(o, o) for o in options if o not in self.fixed}


def tensors(table: str) -> dict[str, str]:
    """Read lines of "path name", ours and theirs, into {path of a leaf: tensor}.

    A name that ends in .weight or .bias is a tensor. Others are a dense layer or,
    where the path ends in "norm", a norm. @1/3 at a name's end is the second third of
    the tensor's outputs.

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
    """Return the tensors of heads of tasks by what ends transformers' classes."""
    return {
        SEQUENCE: sequence,
        CHOICE: choice,
        TOKEN: tensors("task classifier"),
        ANSWER: tensors("task qa_outputs"),
    }
