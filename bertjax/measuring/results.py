# SPDX-License-Identifier: Apache-2.0
"""Convert measured seconds into the printed figures."""

import contextlib
import math
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

ROUND_SECONDS = 4.0  # a round has enough steps to fill this time
Seconds = dict[str, float]


class Measured(NamedTuple):
    """Something that can be timed repeatedly.

    facts: known beforehand; `tokens` is the number of slots of one step. run(n) runs n
    steps and returns the mean seconds per step, by what was timed ("step", ...).
    """

    facts: dict[str, Any]
    run: Callable[[int], Seconds]


def peak_rss_mb() -> float:
    """Return the peak memory of this process in MB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def mean_seconds(step: Callable[[int], Any], steps: int) -> float:
    """Call step(0), step(1), ... and return the mean seconds per call."""
    begun = time.perf_counter()
    for i in range(steps):
        step(i)
    return (time.perf_counter() - begun) / steps


def steps_a_round(seconds: Seconds) -> int:
    """Return the number of steps that fill a round."""
    return max(1, math.ceil(ROUND_SECONDS / sum(seconds.values())))


def summarize(
    facts: dict[str, Any], times: list[Seconds], peak: float
) -> dict[str, Any]:
    """Return medians over rounds, and the spread of the step.

    >>> facts = {"tokens": 100}
    >>> summarize(facts, [{"step": 0.1}, {"step": 0.2}, {"step": 0.4}], 7.0)
    {'tokens_per_second': 500.0, 'step_ms': 200.0, 'step_ms_min': 100.0, \
'step_ms_max': 400.0, 'peak_rss_mb': 7.0}
    """
    facts = dict(facts)
    tokens, peak_flops = facts.pop("tokens"), facts.pop("peak_flops", None)
    seconds = {key: [t[key] for t in times] for key in times[0]}
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    key = "step" if "step" in seconds else next(iter(seconds))
    step, median = seconds.pop(key), medians.pop(key)
    results = {
        "tokens_per_second": tokens / median,
        "step_ms": 1e3 * median,
        "step_ms_min": 1e3 * min(step),
        "step_ms_max": 1e3 * max(step),
        "peak_rss_mb": peak,
        **facts,
    }
    if devices := facts.get("devices"):
        results["tokens_per_second_per_device"] = tokens / median / devices
    if peak_flops:
        results["mfu"] = tokens * facts["flops_per_token"] / median / peak_flops
    results |= {f"{key}_ms": 1e3 * value for key, value in medians.items()}
    if "masking" in medians:
        results["masking_tokens_per_second"] = tokens / medians["masking"]
    if "padded" in medians:
        # Real tokens per second, packed over padded.
        gain = facts["fill"] / facts["fill_padded"]
        ratios = [gain * t["padded"] / t["step"] for t in times]
        results |= spread(ratios)
    if "wait" in medians:
        results["wait_ratio"] = medians["wait"] / median
    return results


def spread(ratios: list[float]) -> dict[str, float]:
    """Return the median, minimum and maximum of ratios by round."""
    ends = {"ratio_min": min(ratios), "ratio_max": max(ratios)}
    return {"ratio": statistics.median(ratios), **ends}


def memory_mb() -> float:
    """Return the current memory of this process, including mapped pages, in MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


@contextlib.contextmanager
def watch_memory() -> Iterator[Callable[[], float]]:
    """Sample the memory every few milliseconds; yield a function of its maximum, MB."""
    most, over = memory_mb(), threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.02):
            most = max(most, memory_mb())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: most
    finally:
        over.set()
        thread.join()
