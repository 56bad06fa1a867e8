# SPDX-License-Identifier: Apache-2.0
"""Names and parsers that check a config's optim.* keys without importing jax."""

import re
from typing import NamedTuple

from bertjax import UserError, registry

DECAY = ("wd", "cautious_decay")
ADAM = (*DECAY, "b1", "b2", "eps")
MUON = (*ADAM, "ns_dtype")
# Optimizer (optim.py) -> the settings of optim.* that it accepts.
OPTIMIZERS = {
    "adamw": (*ADAM, "bias_correction"),
    "lamb": (*ADAM, "bias_correction"),
    "stableadamw": ADAM,
    "adafactor": DECAY,
    "muon": MUON,
    "normuon": MUON,
    "adamuon": MUON,
}
# Schedule (schedules.py) -> the settings of optim.* that not every schedule accepts.
SCHEDULES = {
    "linear": (),
    "polynomial": ("power",),
    "cosine": (),
    "wsd": ("decay", "power"),
    "constant": (),
}
# Config key -> the package's own names, and the function that a module from outside
# defines.
CHOICES = {
    "optim.name": (OPTIMIZERS, "make_optimizer"),
    "optim.schedule": (SCHEDULES, "make_schedule"),
}

# Groups of parameters that optim.rates names (layerwise.group_of).
GROUPS = ("embeddings", "heads", "vectors", "kernels")


def read_rates(text: str) -> dict[str, float]:
    """Parse "embeddings:0.3,heads:0.5": multipliers of the learning rate per group.

    Raises UserError for an unknown or repeated group, and for a multiplier that is not
    a number of at least 0.
    """
    rates: dict[str, float] = {}
    for entry in registry.split_list(text):
        name, _, number = (part.strip() for part in entry.partition(":"))
        try:
            rate = float(number)
        except ValueError:
            rate = -1.0
        if not 0 <= rate < float("inf"):
            raise UserError(
                f"optim.rates={text}: {entry!r} is not GROUP:NUMBER with a number "
                "of at least 0"
            )
        registry.pick("optim.rates", name, dict.fromkeys(GROUPS))
        if name in rates:
            raise UserError(f"optim.rates={text}: {name!r} is given twice")
        rates[name] = rate
    return rates


class FreezeRule(NamedTuple):
    """One part of optim.freeze.

    text: as written; pattern: the regular expression of whole parameter paths; first:
    how many of the first layers or rows are frozen, None for all.
    """

    text: str
    pattern: str
    first: int | None


def read_freeze(text: str) -> list[FreezeRule]:
    """Parse "encoder/embeddings/.*,encoder/layers/.*[:6]": the frozen parameters.

    Each comma-separated part is a regular expression of whole paths. [:N] anywhere in
    it means the first N entries of axis 0: layers for parameters below "layers", rows
    for a table. Raises UserError for an invalid regular expression, and for N = 0.
    """
    rules = []
    for part in split_patterns(text):
        found = re.search(r"\[0?:(\d+)\]", part)
        pattern = part.replace(found[0], "", 1) if found else part
        first = int(found[1]) if found else None
        check_pattern("optim.freeze", text, part, pattern)
        if first == 0:
            raise UserError(f"optim.freeze={text}: {part} freezes the first 0 layers")
        rules.append(FreezeRule(part, pattern, first))
    return rules


def read_keep_zeros(text: str) -> list[FreezeRule]:
    """Parse optim.keep_zeros, such as "encoder/layers/.*": where zeros stay zeros.

    Each comma-separated part is a regular expression of whole paths. Raises UserError
    for an invalid one.
    """
    parts = split_patterns(text)
    for part in parts:
        check_pattern("optim.keep_zeros", text, part, part)
    return [FreezeRule(part, part, None) for part in parts]


def split_patterns(text: str) -> list[str]:
    """Split at the commas outside of braces, such as those of a{1,2}."""
    return [p.strip() for p in re.split(r",(?![^{]*\})", text) if p.strip()]


def check_pattern(key: str, text: str, part: str, pattern: str) -> None:
    """Raise UserError for an invalid regular expression."""
    try:
        re.compile(pattern)
    except re.error as e:
        raise UserError(
            f"{key}={text}: {part} is not a regular expression: {e}"
        ) from None


def settings_of(key: str, name: str) -> tuple[str, ...]:
    """Return the settings of optim.* that an optimizer or a schedule accepts.

    If `name` is a module from outside the package, imports it and reads the settings
    from its function's arguments. Raises UserError for an unknown name.
    """
    known, maker = CHOICES[key]
    if not registry.is_outside(name):
        return registry.pick(key, name, known)
    module, _ = registry.load_outside(key, name, maker)
    return registry.argument_names(key, module, maker)
