# SPDX-License-Identifier: Apache-2.0
"""How a model makes vectors of sentences: the files of sentence-transformers.

modules.json lists the steps; 1_Pooling/config.json and sentence_bert_config.json hold
their options, config_sentence_transformers.json a prompt (sentence_transformers/base/
model.py, .../modules/transformer.py, .../pooling.py). A directory without them is mean
pooling there, and here, of what tokenizer_config.json's model_max_length leaves.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertjax import UserError
from bertjax.interop import hf_read, read_tensors

MODULES, LIMITS = "modules.json", "sentence_bert_config.json"
OLD_LIMITS = tuple(
    f"sentence_{family}_config.json"
    for family in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta")
)
PROMPTS, TOKENIZER = "config_sentence_transformers.json", "tokenizer_config.json"
POOLING, SIMILARITY = "1_Pooling", "similarity_fn_name"
MODES = {  # the names of version 5 and older -> of version 6
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
MODULE = "sentence_transformers.models."
OWN = r"^sentence_transformers\..*\."  # versions differ in where their modules lie
KINDS = ["Transformer", "Pooling", "Normalize"]
UNBOUNDED = 10**9  # transformers writes 10**30 for what has no bound


@dataclasses.dataclass(frozen=True)
class Sentences:
    """How a model makes vectors of sentences.

    pooling: "mean", "cls" or what is not known here; longest: tokens, 0: model's;
    lower: whether text is lower-cased, whatever the tokenizer does; prompt: stands
    before each text; dot: vectors are compared by their inner products, not angles.
    """

    pooling: str = "mean"
    normalize: bool = False
    longest: int = 0
    lower: bool = False
    prompt: str = ""
    dot: bool = False


def sentence_options(source: Any, meta: Mapping[str, Any]) -> Sentences:
    """Return how an opened model makes vectors of sentences. Raises UserError."""
    if isinstance(source, hf_read.Imported):
        return read(source.directory, source.where)
    return Sentences(**meta.get("sentences", {}))


def model_max_length(directory: Path, where: str) -> int:
    """Return how many tokens a tokenizer leaves of a text, 0 where none are said."""
    options = read_tensors.read_json(directory / TOKENIZER, where, required=False)
    key = "model_max_length"
    return _length(TOKENIZER, key, options.get(key) or 0, where)


def _length(name: str, key: str, value: Any, where: str) -> int:
    if type(value) not in (int, float) or value < 0:
        raise UserError(f"{where}: {name}: {key}={value!r} is no length")
    return 0 if value > UNBOUNDED else int(value)


def read(directory: Path, where: str) -> Sentences:
    """Read a directory's files, `where` (flag and value) beginning every message.

    Steps that are not known here (Dense, another order, ...) stand in `pooling`. Raises
    UserError on damaged files.
    """
    longest = model_max_length(directory, where)
    if not (directory / MODULES).exists():
        return Sentences(longest=longest)
    try:
        steps = json.loads((directory / MODULES).read_text("utf-8"))
        kinds = [re.sub(OWN, "", str(step["type"])) for step in steps]
        paths = [str(step["path"]) for step in steps]
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise UserError(f"{where}: {MODULES} is no list of modules ({e})") from e
    prompts = read_tensors.read_json(directory / PROMPTS, where, required=False)
    prompt, key = "", prompts.get("default_prompt_name")
    if key is not None:  # it stands before every text
        texts = prompts.get("prompts") or {}
        prompt = texts.get(key, 0) if isinstance(texts, dict) else 0
        if not isinstance(prompt, str | None):
            raise UserError(f"{where}: {PROMPTS} has no prompt {key!r}")
    pooling = "+".join(kinds) or "nothing"
    if kinds in (KINDS[:2], KINDS):
        model, folder = paths[:2]
        if model or os.path.basename(folder) != folder or folder in ("", ".", ".."):
            path = model or folder
            raise UserError(f"{where}: {MODULES}: the path {path!r} leads elsewhere")
        options = read_tensors.read_json(directory / folder / "config.json", where)
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
    dot = prompts.get(SIMILARITY) == "dot"
    return Sentences(pooling, "Normalize" in kinds, longest, lower, prompt or "", dot)


def write(directory: Path, sentences: Sentences, width: int, longest: int) -> None:
    """Write the files beside a model of `width` whose texts have `longest` tokens.

    Nothing is written where the pooling is not known here.
    """
    if sentences.pooling not in MODES.values():
        return
    paths = ["", POOLING, "2_Normalize"][: 2 + sentences.normalize]
    steps = [
        {"idx": i, "name": str(i), "path": path, "type": MODULE + KINDS[i]}
        for i, path in enumerate(paths)
    ]
    pooling = {key: mode == sentences.pooling for key, mode in MODES.items()}
    pooling = {"word_embedding_dimension": width, **pooling}
    limits = {
        "max_seq_length": min(sentences.longest or longest, longest),
        "do_lower_case": sentences.lower,
    }
    options: dict[str, Any] = {}
    if sentences.prompt:
        options["prompts"] = {"default": sentences.prompt}
        options["default_prompt_name"] = "default"
    if sentences.dot:
        options[SIMILARITY] = "dot"
    files = {MODULES: steps, f"{POOLING}/config.json": pooling, LIMITS: limits}
    files |= {PROMPTS: options} if options else {}
    (directory / POOLING).mkdir()
    for name, content in files.items():
        text = json.dumps(content, indent=2) + "\n"
        (directory / name).write_text(text, "utf-8")
