# SPDX-License-Identifier: Apache-2.0
"""The rate at which tokens are predicted: a number, or a ramp over a phase."""

from typing import Any, NamedTuple

from bertjax import UserError
from bertjax.data.masking.masker import read_masker
from bertjax.data.masking.presets import predictions_per_sequence


class MaskRate(NamedTuple):
    """A rate that changes linearly from `first` to `last` over a phase."""

    first: float
    last: float

    def at(self, progress: float) -> float:
        """Return the rate after the share `progress` of the phase.

        >>> MaskRate(0.30, 0.15).at(0.5)
        0.225
        """
        return self.first + (self.last - self.first) * progress


def read(text: Any, key: str = "data.mask_rate") -> MaskRate | None:
    """Read "0.15", 0.15 or "0.3:0.15"; None or "" means no rate: return None.

    Raises UserError unless the rates are in (0, 1].

    >>> read("0.3:0.15"), read(0.4), read(None)
    (MaskRate(first=0.3, last=0.15), MaskRate(first=0.4, last=0.4), None)
    """
    if text is None or text == "":
        return None
    first, ramp, last = str(text).partition(":")
    try:
        rate = MaskRate(float(first), float(last if ramp else first))
    except ValueError:
        raise UserError(
            f"{key}={text}: give a rate, such as 0.15, or a ramp from one to another, "
            "0.3:0.15"
        ) from None
    if not all(0 < end <= 1 for end in rate):
        raise UserError(f"{key}={text} must be above 0 and at most 1")
    return rate


def last(text: Any) -> float | None:
    """Return the last rate of a ramp, or a constant rate; None if there is no rate."""
    rate = read(text)
    return rate and rate.last


def predictions(data: Any, length: int, rates: tuple[Any, ...]) -> int:
    """Return P, the prediction slots of a row of `length` tokens, for the highest rate.

    data: config.data; rates: those of the phases, as written in the config; None means
    the masking's own rate.
    """
    if data.max_predictions is not None:
        return min(data.max_predictions, length)
    read_rates = [read(rate) for rate in rates]
    ends = {end for rate in read_rates for end in (rate or (None,))}
    return max(predictions_per_sequence(read_masker(data, end), length) for end in ends)
