# SPDX-License-Identifier: Apache-2.0
"""Read and write how a model embeds sentences: the files of sentence-transformers.

modules.json lists the steps; 1_Pooling/config.json and sentence_bert_config.json have
their options; config_sentence_transformers.json has a prompt and the name of the class
that opens the directory (sentence_transformers/base/model.py, .../modules/*.py). A
directory without these files means mean pooling, there and here, of texts that are cut
at model_max_length in tokenizer_config.json.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.interop import hf_read, read_tensors
from bertjax.interop.read_tensors import DTYPES
from bertjax.interop.write_tensors import write_tensors

MODULES, LIMITS = "modules.json", "sentence_bert_config.json"
OLD_LIMITS = tuple(
    f"sentence_{family}_config.json"
    for family in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta")
)
PROMPTS, TOKENIZER = "config_sentence_transformers.json", "tokenizer_config.json"
POOLING, SIMILARITY = "1_Pooling", "similarity_fn_name"
MODES = {  # names in versions up to 5 -> in version 6
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
MODULE = "sentence_transformers.models."
BASE = "sentence_transformers.base.modules."  # of version 6
TRANSFORMER = BASE + "transformer.Transformer"
# the location of their modules differs between versions
OWN = r"^sentence_transformers\..*\."
KINDS = ["Transformer", "Pooling", "Normalize"]
SPARSE = ["Transformer", "SpladePooling"]
MASKED = "MLMTransformer"  # its name in version 5
# Multi-vector options that extend queries, or cut only queries or only passages.
OF_ONE_KIND = ("query_expansion", "query_length", "document_length")
TOKENS = ["Transformer", "Dense", "MultiVectorMask", "Normalize"]
# Sentences.kind -> the class that opens the directory.
CLASSES = {
    "dense": "SentenceTransformer",
    "sparse": "SparseEncoder",
    "multi_vector": "MultiVectorEncoder",
    (CROSS := "cross"): "CrossEncoder",
}
ACTIVE = "max_active_dims"  # of sparse vectors
ACTIVATION = "activation_fn"  # turns a pair's logit into a score
IDENTITY = "torch.nn.modules.linear.Identity"
UNBOUNDED = 10**9  # transformers writes 10**30 for unlimited


@dataclasses.dataclass(frozen=True)
class Sentences:
    """How a model embeds sentences.

    pooling: "mean", "cls" or a name unknown here; longest: tokens, 0: the model's;
    lower: whether to lower-case texts before the tokenizer; prompt: precedes each text;
    dot: vectors are compared by inner products, not angles. kind: a key of CLASSES: a
    text has one vector, weights of the vocabulary, or a vector per token; with CROSS
    only a pair of texts has a score. active: how many weights of the vocabulary to
    keep, 0: unspecified. activation: torch's class that turns a logit of kind CROSS
    into a score, "": the library's default.
    """

    pooling: str = "mean"
    normalize: bool = False
    longest: int = 0
    lower: bool = False
    prompt: str = ""
    dot: bool = False
    kind: str = "dense"
    active: int = 0
    activation: str = ""


def sentence_options(source: Any, meta: Mapping[str, Any]) -> Sentences:
    """Return how an opened model embeds sentences. Raises UserError."""
    if isinstance(source, hf_read.Imported):
        return read(source.directory, source.where)
    if meta.get("config", {}).get("objective") == "rerank":
        return Sentences(kind=CROSS, activation=IDENTITY)
    return Sentences(**meta.get("sentences", {}))


def of_passages(how: Sentences, config: Any, meta: Mapping[str, Any]) -> Sentences:
    """Return how a model embeds passages; how: how it embeds questions.

    If only the questions were trained, against an index, the questions are cut sooner.
    """
    if "index_model" not in meta:
        return how
    return dataclasses.replace(how, longest=config.data.length)


def model_max_length(directory: Path, where: str) -> int:
    """Return a tokenizer's limit of tokens per text, 0 if it has none."""
    options = read_tensors.read_json(directory / TOKENIZER, where, required=False)
    key = "model_max_length"
    return _length(TOKENIZER, key, options.get(key) or 0, where)


def _length(name: str, key: str, value: Any, where: str) -> int:
    if type(value) not in (int, float) or value < 0:
        raise UserError(f"{where}: {name}: {key}={value!r} is not a length")
    return 0 if value > UNBOUNDED else int(value)


def read(directory: Path, where: str) -> Sentences:
    """Read a directory's files; `where` (flag=value) begins every message.

    Unknown steps (Dense, another order, ...) are named in `pooling`. Raises UserError
    for damaged files.
    """
    longest = model_max_length(directory, where)
    if not (directory / MODULES).exists():
        return Sentences(longest=longest)
    try:
        steps = json.loads((directory / MODULES).read_text("utf-8"))
        kinds = [re.sub(OWN, "", str(step["type"])) for step in steps]
        kinds = ["Transformer" if kind == MASKED else kind for kind in kinds]
        paths = [str(step["path"]) for step in steps]
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise UserError(f"{where}: {MODULES} is not a list of modules ({e})") from e
    prompts = read_tensors.read_json(directory / PROMPTS, where, required=False)
    prompt, key = "", prompts.get("default_prompt_name")
    if key is not None:  # the prompt of every text
        texts = prompts.get("prompts") or {}
        prompt = texts.get(key, 0) if isinstance(texts, dict) else 0
        if not isinstance(prompt, str | None):
            raise UserError(f"{where}: {PROMPTS} has no prompt {key!r}")
    pooling = "+".join(kinds) or "nothing"
    kind = "dense"
    if kinds == SPARSE:
        options = _options(directory, paths, where)
        usual = {"pooling_strategy": "max", "activation_function": "relu"}
        if all(options.get(key, value) == value for key, value in usual.items()):
            kind = "sparse"
    elif kinds == TOKENS:
        options = _options(directory, paths, where)
        folder = os.path.basename(paths[2])
        path = directory / folder / "config.json"
        mask = read_tensors.read_json(path, f"{where}: {folder}")
        usual = {"bias": False, "activation_function": IDENTITY, "use_residual": False}
        plain = all(options.get(key, value) == value for key, value in usual.items())
        left = mask.get("skiplist_words") or mask.get("keep_only_token_ids")
        if plain and not left and not _of_one_kind(directory, where, prompts):
            kind = "multi_vector"
    if kinds == KINDS[:1] and prompts.get("model_type") == CLASSES[CROSS]:
        kind = CROSS
    if kinds in (KINDS[:2], KINDS):
        options = _options(directory, paths, where)
        modes = options.get("pooling_mode")
        modes = modes or [mode for key, mode in MODES.items() if options.get(key)]
        pooling = modes if isinstance(modes, str) else "+".join(map(str, modes))
        pooling = pooling or "mean"
        if prompt and options.get("include_prompt") is False:
            pooling += " without the prompt"
        if size := prompts.get("truncate_dim"):
            pooling += f" cut to {size} numbers"
    names = [name for name in (LIMITS, *OLD_LIMITS) if (directory / name).exists()]
    name = names[0] if names else LIMITS
    limits = read_tensors.read_json(directory / name, where, required=False)
    if (value := limits.get(key := "max_seq_length")) is not None:
        longest = _length(name, key, value, where)
    lower = bool(limits.get("do_lower_case"))
    dot = prompts.get(SIMILARITY) == "dot" or kind != "dense"
    normalize = "Normalize" in kinds
    active = prompts.get(ACTIVE) if kind == "sparse" else None
    own = longest, lower, prompt or "", dot, kind, int(active or 0)
    activation = str(prompts.get(ACTIVATION) or "") if kind == CROSS else ""
    return Sentences(pooling, normalize, *own, activation)


def _of_one_kind(directory: Path, where: str, prompts: Mapping[str, Any]) -> bool:
    """Return whether queries are embedded differently from passages."""
    limits = read_tensors.read_json(directory / LIMITS, where, required=False)
    settings = [*(limits.get(key) or prompts.get(key) for key in OF_ONE_KIND)]
    texts = prompts.get("prompts")
    named = {*texts.values()} if isinstance(texts, dict) else set()
    return any(settings) or len(named - {"", None}) > 1


def _options(directory: Path, paths: list[str], where: str) -> dict[str, Any]:
    """Read the config.json of the second step. Raises UserError."""
    model, folder = paths[:2]
    if model or os.path.basename(folder) != folder or folder in ("", ".", ".."):
        path = model or folder
        raise UserError(f"{where}: {MODULES}: the path {path!r} leads elsewhere")
    path = directory / folder / "config.json"
    return read_tensors.read_json(path, f"{where}: {folder}")


def read_projection(directory: Path, where: str) -> np.ndarray:
    """Read the projection of a multi_vector directory: f32 [D, E].

    where: begins messages. Raises UserError if its file is missing or damaged.
    """
    steps = json.loads((directory / MODULES).read_text("utf-8"))
    folder = os.path.basename(steps[1]["path"])
    where = f"{where}: {folder}"
    file = read_tensors.inside(directory / folder, read_tensors.SINGLE, where)
    weight = read_tensors.open_safetensors(file, where).get("linear.weight")
    if weight is None or len(weight.shape) != 2 or weight.dtype not in DTYPES:
        raise UserError(f"{where}: {file.name} has no matrix linear.weight of floats")
    return np.ascontiguousarray(weight.rows(0, weight.shape[0]).T)


def read_head(source: hf_read.Imported) -> dict[str, Any]:
    """Return parameters that embedding sentences needs besides the model's own.

    That is the projection for kind multi_vector, and nothing for others. Raises
    UserError.
    """
    if read(source.directory, source.where).kind != "multi_vector":
        return {}
    return {"colbert": {"kernel": read_projection(source.directory, source.where)}}


def write(
    directory: Path,
    sentences: Sentences,
    width: int,
    longest: int,
    projection: np.ndarray | None = None,
) -> None:
    """Write the files beside a model of `width` whose texts have `longest` tokens.

    projection: f32 [width, E], for kind multi_vector. Writes nothing
    for an unknown pooling.
    """
    if sentences.kind == "dense" and sentences.pooling not in MODES.values():
        return
    limits: dict[str, Any] = {
        "max_seq_length": min(sentences.longest or longest, longest),
        "do_lower_case": sentences.lower,
    }
    options: dict[str, Any] = {}
    if sentences.prompt:
        options["prompts"] = {"default": sentences.prompt}
        options["default_prompt_name"] = "default"
    if sentences.kind == "sparse":
        files = _sparse_steps(limits)
    elif sentences.kind == "multi_vector":
        assert projection is not None
        files = _token_steps(directory, projection, limits)
    elif sentences.kind == CROSS:
        _to_output(limits, "sequence-classification", "logits", "scores")
        files = {MODULES: _steps([""], [TRANSFORMER])}
        if sentences.activation:
            options[ACTIVATION] = sentences.activation
    else:
        files = _dense_steps(sentences, width)
        if sentences.dot:
            options[SIMILARITY] = "dot"
    if sentences.active:
        options[ACTIVE] = sentences.active
    if sentences.kind != "dense":
        options["model_type"] = CLASSES[sentences.kind]
    _write_json(directory, {**files, LIMITS: limits, PROMPTS: options})


def _dense_steps(sentences: Sentences, width: int) -> dict[str, Any]:
    # Paths and keys of version 2, which all versions read.
    paths = ["", POOLING, "2_Normalize"][: 2 + sentences.normalize]
    names = [MODULE + kind for kind in KINDS[: len(paths)]]
    pooling = {key: mode == sentences.pooling for key, mode in MODES.items()}
    pooling = {"word_embedding_dimension": width, **pooling}
    return {MODULES: _steps(paths, names), f"{POOLING}/config.json": pooling}


def _sparse_steps(limits: dict[str, Any]) -> dict[str, Any]:
    _to_output(limits, "fill-mask", "logits", "token_embeddings")
    names = [TRANSFORMER]
    names += [
        "sentence_transformers.sparse_encoder.modules.splade_pooling.SpladePooling"
    ]
    pooling = {"pooling_strategy": "max", "activation_function": "relu"}
    steps = _steps(["", "1_SpladePooling"], names)
    return {MODULES: steps, "1_SpladePooling/config.json": pooling}


def _token_steps(
    directory: Path, projection: np.ndarray, limits: dict[str, Any]
) -> dict[str, Any]:
    last, tokens = "last_hidden_state", "token_embeddings"
    _to_output(limits, "feature-extraction", last, tokens)
    mask = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask."
    names = [TRANSFORMER, BASE + "dense.Dense"]
    names += [mask + "MultiVectorMask", BASE + "normalize.Normalize"]
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(TOKENS) if i)]
    both = {"module_input_name": tokens, "module_output_name": tokens}
    dense = {"in_features": len(projection), "out_features": projection.shape[1]}
    dense |= {"bias": False, "activation_function": IDENTITY, **both}
    skip = {"skiplist_words": [], "skiplist_tasks": ["document"]}
    configs = [dense, {**skip, "keep_only_token_ids": None}, both]
    files = {f"{p}/config.json": c for p, c in zip(paths[1:], configs, strict=True)}
    (directory / paths[1]).mkdir()
    weight = np.ascontiguousarray(projection.T, "<f4")
    write_tensors(directory / paths[1] / read_tensors.SINGLE, {"linear.weight": weight})
    return {MODULES: _steps(paths, names), **files}


def _to_output(limits: dict[str, Any], task: str, read: str, name: str) -> None:
    """Name transformers' class that opens the model, and the output to read."""
    how = {"text": {"method": "forward", "method_output_name": read}}
    limits |= {"transformer_task": task, "modality_config": how}
    limits["module_output_name"] = name


def _steps(paths: list[str], names: list[str]) -> list[dict[str, Any]]:
    pairs = enumerate(zip(paths, names, strict=True))
    return [{"idx": i, "name": str(i), "path": p, "type": n} for i, (p, n) in pairs]


def _write_json(directory: Path, files: Mapping[str, Any]) -> None:
    for name, content in files.items():
        if content:
            (directory / name).parent.mkdir(exist_ok=True)
            text = json.dumps(content, indent=2) + "\n"
            (directory / name).write_text(text, "utf-8")
