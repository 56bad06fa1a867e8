# SPDX-License-Identifier: Apache-2.0
"""ELECTRA's two models as one, with the parameters of our objective of that name.

{"encoder", "generator", "mlm", "rtd"}: the discriminator and its head, what is the
generator's own, its head. The embeddings, but for the projection, are in "encoder"
alone (bertjax/objectives/electra.py).
"""

import dataclasses
import re
from pathlib import Path

import numpy as np

from bertjax import UserError
from bertjax.interop.hf_read import Imported, few
from bertjax.interop.stored_tensor import are_equal
from bertjax.models.config import RUNTIME, EncoderConfig, generator_config

# What does not decide what a generator computes.
FREE = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range")
FREE += ("pooler", "dtype", *RUNTIME)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair(Imported):
    """The discriminator, whose fields these are, with its generator.

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

    @property
    def paths(self) -> list[str]:
        own = [p for p in super().paths if p.startswith(("encoder/", "rtd/"))]
        paths = [p for p in self.generator.paths if p.startswith(("encoder/", "mlm/"))]
        own += [re.sub("^encoder/", "generator/", p) for p in paths if not is_shared(p)]
        return own

    def shape(self, path: str) -> tuple[int, ...]:
        own = _path_in_generator(path)
        return self.generator.shape(own) if own else super().shape(path)

    def read(self, path: str) -> np.ndarray:
        own = _path_in_generator(path)
        return self.generator.read(own) if own else super().read(path)


def is_shared(path: str) -> bool:
    """True for what both encoders read in the discriminator."""
    start = "encoder/embeddings/"
    return path.startswith(start) and not path.startswith(start + "projection/")


def _path_in_generator(path: str) -> str:
    """Return what the pair's leaf is called in the generator; "": it has none."""
    own = path.startswith(("generator/", "mlm/"))
    return re.sub("^generator/", "encoder/", path) if own else ""


def join(discriminator: Imported, generator: Imported, root: Path, where: str) -> Pair:
    """Make one model of two.

    Raises UserError when they are no pair: another family, a head that is missing,
    embeddings that are not shared, a generator that our objective would make otherwise.
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
    _check_shared(discriminator, generator, where)
    _check_config(discriminator.cfg, generator.cfg, where)
    unexpected = [f"{k}: {n}" for k, half in halves.items() for n in half.unexpected]
    fields = {**vars(discriminator), "where": where, "missing": ()}
    fields["unexpected"] = tuple(unexpected)
    return Pair(**fields, generator=generator, root=root)


def _check_shared(a: Imported, b: Imported, where: str) -> None:
    different = []
    for path in filter(is_shared, dict.fromkeys([*a.paths, *b.paths])):
        both = [m.tensors.get(m.family.names[path]) for m in (a, b)]
        if None in both or not are_equal(*both):
            different.append(path.removeprefix("encoder/"))
    if different:
        raise UserError(
            f"{where}: generator and discriminator have different {few(different)}: a "
            "pair that does not share its embeddings is not supported"
        )


def _check_config(cfg: EncoderConfig, small: EncoderConfig, where: str) -> None:
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
