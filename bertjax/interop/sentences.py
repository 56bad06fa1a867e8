# SPDX-License-Identifier: Apache-2.0
"""How a model makes vectors of sentences: the files of sentence-transformers.

modules.json lists the steps; 1_Pooling/config.json and sentence_bert_config.json hold
their options (sentence_transformers/base/model.py, .../modules/pooling.py). A directory
without them is mean pooling there, and here.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertjax import UserError
from bertjax.interop import hf, tensors

MODULES, LIMITS = "modules.json", "sentence_bert_config.json"
POOLING = "1_Pooling"
MODES = {  # the names of version 5 and older -> of version 6
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclasses.dataclass(frozen=True)
class Sentences:
    """pooling: "mean", "cls" or what is not known here; longest: tokens, 0: model's."""

    pooling: str = "mean"
    normalize: bool = False
    longest: int = 0


def wanted(source: Any, meta: Mapping[str, Any]) -> Sentences:
    """Return what a model of `disk.open_model` was made for. Raises UserError."""
    if isinstance(source, hf.Imported):
        return read(source.directory, source.where)
    return Sentences(**meta.get("sentences", {}))


def read(directory: Path, where: str) -> Sentences:
    """Read a directory's files, `where` (flag and value) beginning every message.

    Steps that are not known here (Dense, ...) stand in `pooling`. Raises UserError on
    damaged files.
    """
    if not (directory / MODULES).exists():
        return Sentences()
    try:
        steps = json.loads((directory / MODULES).read_text("utf-8"))
        kinds = {str(s["type"]).rpartition(".")[2]: str(s["path"]) for s in steps}
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise UserError(f"{where}: {MODULES} is no list of modules ({e})") from e
    others = kinds.keys() - {"Transformer", "Pooling", "Normalize"}
    pooling = "+".join(sorted(others))
    if not others and (folder := kinds.get("Pooling")) is not None:
        if os.path.basename(folder) != folder or folder in ("", ".", ".."):
            raise UserError(f"{where}: {MODULES}: the path {folder!r} leads elsewhere")
        told = tensors.read_json(directory / folder / "config.json", where)
        modes = told.get("pooling_mode")
        modes = modes or [mode for key, mode in MODES.items() if told.get(key)]
        modes = [modes] if isinstance(modes, str) else modes
        pooling = "+".join(map(str, modes))
    longest = 0
    if (directory / LIMITS).exists():
        longest = tensors.read_json(directory / LIMITS, where).get("max_seq_length")
        longest = longest or 0
        if type(longest) is not int or longest < 0:
            raise UserError(f"{where}: {LIMITS}: max_seq_length={longest!r}")
    return Sentences(pooling or "mean", "Normalize" in kinds, longest)


def write(directory: Path, sentences: Sentences, width: int, longest: int) -> None:
    """Write the files beside a model of `width` whose texts have `longest` tokens.

    Nothing is written where the pooling is not known here.
    """
    if sentences.pooling not in MODES.values():
        return
    kinds = {"Transformer": "", "Pooling": POOLING}
    if sentences.normalize:
        kinds["Normalize"] = "2_Normalize"
    steps = [
        {
            "idx": i,
            "name": str(i),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, (kind, path) in enumerate(kinds.items())
    ]
    pooling: dict[str, Any] = {"word_embedding_dimension": width}
    pooling |= {key: mode == sentences.pooling for key, mode in MODES.items()}
    limits = {
        "max_seq_length": min(sentences.longest or longest, longest),
        "do_lower_case": False,  # the tokenizer does it
    }
    (directory / POOLING).mkdir()
    for name, content in {
        MODULES: steps,
        f"{POOLING}/config.json": pooling,
        LIMITS: limits,
    }.items():
        text = json.dumps(content, indent=2) + "\n"
        (directory / name).write_text(text, "utf-8")
