# SPDX-License-Identifier: Apache-2.0
"""Open a directory of another library, whichever format it has.

It may have config.json and tensors (hf_read.py), a TensorFlow 1 checkpoint (tf1.py), or
generator/ and discriminator/ of the first format. The last two are ELECTRA's, and
become one model with the parameters of our objective of that name, {"encoder",
"generator", "mlm", "rtd"}: the discriminator and its head, the generator's own layers
and its head. The embeddings, except the projection, are only in "encoder"
(bertjax/objectives/electra.py).
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

from bertjax import UserError, join_names
from bertjax.interop import hf_read, read_tensors, tf1
from bertjax.interop.hf_read import Imported
from bertjax.interop.read_tensors import are_equal
from bertjax.models.config import RUNTIME, EncoderConfig, generator_config

OURS = ("overrides.json", "checkpoints", "meta.json")
THEIRS = (hf_read.CONFIG, read_tensors.SINGLE, read_tensors.INDEX, read_tensors.PICKLE)
HALVES = ("discriminator", "generator")
# Options that do not change what a generator computes.
FREE = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")
FREE += ("pooler", "dtype", *RUNTIME)


def is_directory(path: Any) -> bool:
    """Return whether a path looks like another library's directory, not a workdir."""
    if any((path / name).exists() for name in OURS):
        return False
    return _is_hf(path) or _is_pair(path) or tf1.is_directory(path)


def _is_hf(path: Any) -> bool:
    return any((path / name).exists() for name in THEIRS)


def _is_pair(path: Any) -> bool:
    return all((path / name).is_dir() for name in HALVES)


def tokenizer_folders(path: Any) -> list[Any]:
    """Return the folders of a directory's tokenizer: both halves of a pair have one."""
    return [path / name for name in HALVES] if _is_pair(path) else [path]


def open_model(directory: Path, where: str) -> hf_read.Imported:
    """Open any supported directory. Raises UserError; `where` begins messages."""
    if _is_hf(directory):
        return hf_read.open_model(directory, where)
    if _is_pair(directory):
        models = [hf_read.open_model(directory / n, f"{where}/{n}") for n in HALVES]
    else:
        models = tf1.open_models(directory, where)
    if len(models) == 1:
        return models[0]
    return join_pair(*models, directory, where)


# ---------------------------------------------------------------- ELECTRA's pairs
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair(Imported):
    """A discriminator, whose fields these are, with its generator.

    root: the directory of both.
    """

    generator: Imported
    root: Path

    def __str__(self) -> str:
        return str(self.root)

    @property
    def share(self) -> float:
        """The generator's width as a share of the discriminator's."""
        return self.generator.cfg.hidden_size / self.cfg.hidden_size


def is_shared(path: str) -> bool:
    """Return whether both encoders read this leaf of the discriminator."""
    start = "encoder/embeddings/"
    return path.startswith(start) and not path.startswith(start + "projection/")


def join_pair(
    discriminator: Imported, generator: Imported, root: Path, where: str
) -> Pair:
    """Join a discriminator and a generator into one model.

    Raises UserError if they are no pair: another family, a missing head, embeddings
    that are not shared, or a generator unlike the one that our objective builds.
    """
    halves = {"discriminator": discriminator, "generator": generator}
    for (name, half), head in zip(halves.items(), ("rtd", "mlm"), strict=True):
        if half.family.model_type != "electra":
            raise UserError(
                f"{where}: the {name} is of the family {half.family.model_type}: only "
                "ELECTRA's are pairs"
            )
        if head not in half.heads:
            raise UserError(f"{where}: the {name} has no {head} head")
    different = []
    for path in filter(is_shared, {**discriminator.leaves, **generator.leaves}):
        both = [x.tensors.get(x.family.names[path]) for x in halves.values()]
        if None in both or not are_equal(*both):
            different.append(path.removeprefix("encoder/"))
    if different:
        raise UserError(
            f"{where}: generator and discriminator have different "
            f"{join_names(different, 6)}: a pair that does not share its embeddings is "
            "not supported"
        )
    cfg, small = discriminator.cfg, generator.cfg
    try:
        if small.hidden_size > cfg.hidden_size:
            raise UserError("the generator is wider than the discriminator")
        supported = generator_config(cfg, small.hidden_size)
    except UserError as e:
        raise UserError(f"{where}: {e}") from e
    for field in dataclasses.fields(EncoderConfig):
        has, needs = (getattr(c, field.name) for c in (small, supported))
        if field.name not in FREE and has != needs:
            raise UserError(
                f"{where}: the generator has {field.name}={has}; with this "
                f"discriminator only {needs} is supported"
            )
    own = ("encoder/", "rtd/")
    leaves = {p: x for p, x in discriminator.leaves.items() if p.startswith(own)}
    for path, leaf in generator.leaves.items():
        if path.startswith(("encoder/", "mlm/")) and not is_shared(path):
            names = [(f"generator:{name}", *part) for name, *part in leaf.tensors]
            path = re.sub("^encoder/", "generator/", path)
            leaves[path] = leaf._replace(tensors=names)
    tensors = {f"generator:{name}": x for name, x in generator.tensors.items()}
    unexpected = [f"{k}: {n}" for k, half in halves.items() for n in half.unexpected]
    fields = {**vars(discriminator), "where": where, "missing": (), "leaves": leaves}
    fields |= {"tensors": {**discriminator.tensors, **tensors}}
    fields |= {"unexpected": tuple(unexpected), "generator": generator, "root": root}
    return Pair(**fields)
