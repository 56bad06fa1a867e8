# SPDX-License-Identifier: Apache-2.0
"""The options of text generation: the flags of bertjax.generate."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bertjax import UserError, registry
from bertjax.data.corpus.line_repair import check_utf8

HOW = ("left", "unmask")
EARLY_STOPPING = ("false", "true", "never")
# The options that only one value of --how reads; None if they are not given.
LEFT = ("num_beams", "length_penalty", "early_stopping", "repetition_penalty")
LEFT += ("prefix", "stop", "rank")
UNMASK = ("order", "steps", "gamma", "block", "remask")
RANGES: dict[str, tuple[float, float]] = {
    "max_new_tokens": (1, 2**24),
    "num_beams": (1, 1024),
    "num_return_sequences": (1, 4096),
    "rank": (1, 4096),
    "seed": (0, 2**32 - 1),
    "top_k": (1, 2**31 - 1),
    "steps": (1, 2**24),
    "block": (1, 2**24),
    "batch_size": (1, 2**20),
}
NEW_TOKENS = 64
REALS: dict[str, tuple[float, float]] = {
    "temperature": (0, 1e6),
    "top_p": (0, 1),
    "length_penalty": (-100, 100),
    "repetition_penalty": (1e-3, 1e3),
    "gamma": (0, 1e9),
    "remask": (0, 1),
}


class PromptError(UserError):
    """One prompt is at fault; number: its place in the list of prompts, from 0."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


@contextlib.contextmanager
def reading_prompt(number: int) -> Iterator[None]:
    """Say of a UserError in the block which prompt is at fault."""
    try:
        yield
    except UserError as e:
        raise PromptError(str(e), number) from e


class Options(NamedTuple):
    """How texts are generated; docs/generation.md explains each option.

    how: "left", "unmask", or "" for the way that the model was trained for. None means
    that an option was not given; the properties have the defaults. stop: strings, of
    which the first one to occur ends a text.
    """

    max_new_tokens: int | None = None
    num_return_sequences: int = 1
    seed: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    how: str = ""
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: str | None = None
    repetition_penalty: float | None = None
    prefix: str | None = None
    stop: Sequence[str] | None = None
    rank: int | None = None
    order: str | None = None
    steps: int | None = None
    gamma: float | None = None
    block: int | None = None
    remask: float | None = None
    batch_size: int = 32

    @property
    def new_tokens(self) -> int:
        return self.max_new_tokens or NEW_TOKENS

    @property
    def samples(self) -> int:
        """The texts generated per prompt; with `rank` the most likely are returned."""
        return self.rank or self.num_return_sequences

    @property
    def beams(self) -> int:
        return self.num_beams or 1

    @property
    def draw_temperature(self) -> float:
        """The temperature by which logits are divided before sampling; 0: greedy."""
        if self.temperature is not None:
            return self.temperature
        return 1.0 if self.top_k is not None or self.top_p is not None else 0.0


def check_options(options: Options) -> None:
    """Raise UserError for values out of range, and for incompatible options.

    `check_how` checks --how.
    """
    for name, (least, most) in RANGES.items():
        value = getattr(options, name)
        if value is not None and not (type(value) is int and least <= value <= most):
            upto = f" to {most}" * (type(value) is int and value > most)
            raise UserError(
                f"--{name}={value!r} must be a whole number from {least}{upto}"
            )
    for name, (low, high) in REALS.items():
        value = getattr(options, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or (is_number and low <= value <= high):
            continue
        raise UserError(f"--{name}={value!r} must be a number from {low:g} to {high:g}")
    if options.how:
        registry.pick("--how", options.how, dict.fromkeys(HOW))
    if options.early_stopping is not None:
        known = dict.fromkeys(EARLY_STOPPING)
        registry.pick("--early_stopping", options.early_stopping, known)
    prefix, stop = options.prefix, options.stop
    if isinstance(stop, str) or not all(s and isinstance(s, str) for s in stop or ()):
        raise UserError(f"--stop={stop!r} must be strings that are not empty")
    if not isinstance(prefix, str | None):
        raise UserError(f"--prefix={prefix!r} must be a string")
    for text in (prefix or "", *(stop or ())):
        check_utf8(text)
    _check_draws(options)


def _check_draws(options: Options) -> None:
    temperature, n = options.draw_temperature, options.num_return_sequences
    if options.rank is not None:
        if not temperature or options.beams > 1:
            raise UserError(
                f"--rank={options.rank} ranks texts that are drawn: give --top_k or "
                "--temperature, and no --num_beams"
            )
        if options.rank < n:
            raise UserError(
                f"--num_return_sequences={n} is more than --rank={options.rank}"
            )
    for name in ("top_k", "top_p"):
        if getattr(options, name) is not None and not temperature:
            raise UserError(
                f"--{name}={getattr(options, name)} needs a --temperature above 0: "
                "nothing is drawn"
            )
    if options.beams == 1:
        for name in ("length_penalty", "early_stopping"):
            if getattr(options, name) is not None:
                raise UserError(
                    f"--{name}={getattr(options, name)} needs --num_beams of 2 or more"
                )
        # A random order leads to different texts too.
        is_drawn = temperature or options.order == "random" or options.remask
        if n > 1 and not is_drawn:
            raise UserError(
                f"--num_return_sequences={n}: they would all be the same; draw them "
                f"(--temperature=1), or give --num_beams={n}"
            )
        return
    if temperature:
        raise UserError(
            f"--num_beams={options.beams}: beams are not drawn; leave out "
            "--temperature, --top_k and --top_p, or --num_beams"
        )
    if n > options.beams:
        raise UserError(
            f"--num_return_sequences={n} is more than --num_beams={options.beams}"
        )


def check_how(options: Options, able: Sequence[str], where: str, why: str) -> str:
    """Return the way in which texts are generated: --how, or the model's first.

    able: the ways that the model was trained for; where, why: for messages, the model
    and what it is. Raises UserError for another way, and for options that it does not
    read.
    """
    how = options.how or able[0]
    if how not in able:
        raise UserError(f"--how={how}: {where} {why}: use --how={able[0]}")
    other, others = ("unmask", UNMASK) if how == "left" else ("left", LEFT)
    for name in others:
        if getattr(options, name) is not None:
            fits = f"--how={other}" if other in able else f"models with --how={other}"
            raise UserError(
                f"--{name} has no effect with --how={how}: it is read with {fits}; "
                "leave it out"
            )
    if how == "unmask":
        _check_order(options)
    return how


def _check_order(options: Options) -> None:
    from bertjax.generation.unmask import ORDERS

    order = options.order or "confidence"
    registry.pick("--order", order, dict.fromkeys(ORDERS))
    clashes = (
        ("gamma", order != "entropy", "needs --order=entropy"),
        ("gamma", bool(options.gamma and options.steps), "does not go with --steps"),
        ("remask", order == "left", "does not go with --order=left"),
        ("remask", options.block is not None, "does not go with --block"),
        ("remask", bool(options.gamma), "does not go with --gamma"),
    )
    for name, is_wrong, what in clashes:
        value: Any = getattr(options, name)
        if value is not None and is_wrong and not math.isclose(value, 0):
            raise UserError(f"--{name}={value:g} {what}")
