# SPDX-License-Identifier: Apache-2.0
"""Define the tracks of the speedrun: device, time, recipe and targets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bertjax import UserError, counted
from bertjax.speedruns.corpus import PARTS

PASSES = 10  # the most passes over the text


class Track(NamedTuple):
    """A track of the speedrun.

    platform, kind, devices: jax's; `kind` is a part of its device_kind. clock: what the
    minutes measure: "wall", or "processor" for all cores together. config, flags: the
    recipe unless the command line names another. pieces: of the tokenizer. length,
    rate: of the held-out rows. loss, pairs: the targets: nats per masked token, and the
    share of correct minimal pairs; None: undecided.
    """

    platform: str
    kind: str
    devices: int
    clock: str
    minutes: float
    config: str
    flags: tuple[str, ...]
    pairs: float
    loss: float | None = None
    pieces: int = 8_192
    length: int = 64
    rate: float = 0.15

    @property
    def needs(self) -> str:
        """The device it runs on."""
        if self.platform == "cpu":
            return "CPU cores"
        return f"{self.devices} x {self.kind}"

    @property
    def budget(self) -> str:
        """The time it may take."""
        of = "" if self.clock == "wall" else " of processor time"
        return f"{self.minutes:g} minute{'s' * (self.minutes != 1)}{of}"


# 6 layers of 192; causal rows first, then one masked row to three causal ones.
HYBRID = (
    "model.hidden_size=192",
    "model.num_attention_heads=3",
    "model.intermediate_size=384",
    "objective=mntp*1+clm*3",
    "phases=percent=70 objective=clm; mask_rate=0.3",
    "total.steps=30_000",
)

# 12 layers of 512; causal rows for 30% of the run, then one masked row to one causal.
MEDIUM = (
    "objective=mntp*1+clm*1",
    "phases=percent=30 objective=clm; mask_rate=0.3",
    "optim.wd=0.1",
    "model.hidden_dropout_prob=0.1",
    "total.steps=8_000",
)

TRACKS: Mapping[str, Track] = {
    "cpu20m": Track(
        "cpu", "", 1, "processor", 40, "modern.py:tiny", ("total.steps=8_000",), 0.58
    ),
    "cpu3h": Track("cpu", "", 1, "processor", 360, "modern.py:mini", HYBRID, 0.64),
    "h200-25min": Track(
        "gpu", "H200", 1, "wall", 25, "modern.py:medium", MEDIUM, 0.725
    ),
    "v5e8": Track("tpu", "v5 lite", 8, "wall", 15, "modern.py:medium", MEDIUM, 0.7),
}

# Keys that are the same for every entry of a track.
RULED = "data.train data.valid data.tokenizer data.vocab data.vocab_size init_from"
RULED += " data.lower_case budget_minutes budget_clock"


def rules(track: Track, corpus: Path) -> dict[str, Any]:
    """Return the config values that the track fixes."""
    parts = [f"{part.name}={corpus / f'{part.name}.txt'}" for part in PARTS]
    return {
        "data.train": ",".join(parts),
        "data.valid": str(corpus / "valid.txt"),
        "data.tokenizer": "wordpiece",
        "data.vocab_size": track.pieces,
        "data.lower_case": True,
    }


def check_overrides(name: str, overrides: Mapping[str, Any]) -> None:
    """Refuse command-line overrides of keys that the rules fix. Raises UserError."""
    for key in RULED.split():
        if key in overrides:
            raise UserError(
                f"--config.{key}: the rules of --track={name} set it "
                "(docs/speedrun.md): leave it out"
            )


def check_recipe(name: str, config: Any) -> None:
    """Refuse weights, a tokenizer, a time budget or an early end in a recipe.

    A recipe's own file may not have them either. Raises UserError.
    """
    given = {key: config[key] for key in ("init_from", "teacher", "budget_minutes")}
    given |= {"data.vocab": config.data.vocab, "eval.patience": config.eval.patience}
    for key, value in given.items():
        if value:
            raise UserError(
                f"{key}={value}: the rules of --track={name} do not allow it "
                "(docs/speedrun.md): leave it out"
            )


def check_devices(name: str, track: Track) -> str:
    """Return what is wrong with this machine's devices for a track, or ""."""
    import jax

    devices = jax.devices()
    kind, platform = devices[0].device_kind, devices[0].platform
    if track.platform == "cpu" == platform:
        return ""
    fits = platform == track.platform and track.kind in kind
    if fits and len(devices) == track.devices:
        return ""
    have = f"{counted(len(devices), 'device')} of {kind}"
    return f"--track={name} runs on {track.needs}, and this machine has {have}"
