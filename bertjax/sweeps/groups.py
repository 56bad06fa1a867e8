# SPDX-License-Identifier: Apache-2.0
"""The states of a sweep's runs, trained, scored and saved group by group.

FOLDER/<group>/checkpoints/<step>     a group's states, of all groups at the same steps
FOLDER/best/checkpoints/<step>        the parameters that were the best until that step
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.checkpoints import manifest
from bertjax.checkpoints.manager import Checkpoints, restore_params
from bertjax.parallel.sharding import batch_sharding
from bertjax.sweeps import stacked_runs


class Groups:
    """All runs of a sweep, in groups that the same programs go through one by one.

    runs: (seed, rate) of each. size: runs of a group. keeps: whether one run's
    parameters are held beside, in `best` (`keep`). `done`: the steps that were trained.
    """

    def __init__(
        self,
        programs: Any,
        runs: Sequence[tuple[int, float]],
        size: int,
        mesh: Any,
        folder: Any,
        keeps: bool,
    ) -> None:
        self.programs, self.runs, self.size = programs, runs, size
        self.filled = stacked_runs.fill(runs, size)  # the last ones are not looked at
        count = len(self.filled) // size
        self.parts = [slice(i * size, (i + 1) * size) for i in range(count)]
        seeds, rates = zip(*self.filled, strict=True)
        self.seeds = np.array(seeds, np.int32).reshape(-1, size)
        self.rates = np.array(rates, np.float32).reshape(-1, size)
        self.place = stacked_runs.stack(batch_sharding(mesh))
        names = [*map(str, range(count)), *["best"] * keeps]
        self.saved = [Checkpoints(folder / name, 2, None) for name in names]
        self.keeps = keeps
        self.done = 0
        self.best: Any = None
        self.states: list[Any] = []
        self.longest: list[jax.Array] = []

    def begin(self, params: Any) -> None:
        """Begin at step 0; params: leaves to take instead of drawn ones, or {}."""
        self.states = [self.programs.begin(s) for s in self.seeds]
        if params:
            self.states = [stacked_runs.give_params(s, params) for s in self.states]
        self._count([0] * len(self.runs))
        if self.keeps:
            self.keep(0)

    def restore(self, step: int, streaks: Sequence[int]) -> None:
        """Go on after a saved step, and forget later ones, which some may lack."""
        for one in self.saved:
            one.drop_after(step)
        wanted = self.programs.shapes(self.size)[0]
        groups = self.saved[: len(self.parts)]
        self.states = [one.restore(step, wanted) for one in groups]
        self._count(streaks)
        if self.keeps:
            self.best = restore_params(self.saved[-1].folder / str(step))
        self.done = step

    def _count(self, streaks: Sequence[int]) -> None:
        filled = np.array(stacked_runs.fill(streaks, self.size), np.int32)
        self.longest = [jnp.array(filled[p]) for p in self.parts]

    @property
    def newest(self) -> int:
        """The last step at which everything is saved; 0 without one."""
        saved = [{*manifest.steps(one.workdir)} for one in self.saved]
        return max(set.intersection(*saved), default=0)

    @property
    def streaks(self) -> list[int]:
        """Of each run the most updates in a row that were skipped."""
        counts = np.concatenate([*map(np.asarray, self.longest)])
        return counts[: len(self.runs)].tolist()

    @property
    def skipped(self) -> list[int]:
        """Of each run how many updates were."""
        counts = [np.asarray(s.guard.skipped) for s in self.states]
        return np.concatenate(counts)[: len(self.runs)].tolist()

    def going(self, ended: Collection[int]) -> list[int]:
        """Return the groups with a run that has not ended."""
        left = {i // self.size for i in range(len(self.runs)) if i not in ended}
        return sorted(left)

    def advance(self, batch: Mapping[str, np.ndarray], ended: Collection[int]) -> None:
        """Train a step; batch: of all `filled` runs, axis 0."""
        for i in self.going(ended):
            fed = {k: v[self.parts[i]] for k, v in batch.items()}
            fed = jax.device_put(fed, self.place)
            self.states[i], metrics = self.programs.advance(
                self.states[i], fed, self.seeds[i], self.rates[i]
            )
            self.longest[i] = jnp.maximum(self.longest[i], metrics["streak"])
        self.done += 1

    def score(
        self, batches: Iterable[Mapping[str, Any]], ended: Collection[int]
    ) -> dict[int, Any]:
        """Evaluate each run that has not ended: as stacked_runs.score tells of one."""
        groups = self.going(ended)
        params = [self.states[i].params for i in groups]
        found = stacked_runs.score(self.programs.evaluate, params, batches)
        places = [i * self.size + k for i in groups for k in range(self.size)]
        known = {*range(len(self.runs))} - {*ended}
        scored = zip(places, found, strict=True)
        return {run: one for run, one in scored if run in known}

    def params(self, run: int) -> Any:
        """Return the parameters of a run as numpy arrays."""
        group, at = divmod(run, self.size)
        return jax.device_get(stacked_runs.take(self.states[group].params, at))

    def keep(self, run: int) -> None:
        """Hold the parameters that a run has now, in the place of those before."""
        self.best = self.params(run)

    def save(self, meta: dict[str, Any]) -> None:
        """Save everything at this step; returns when it is copied."""
        states = [*self.states, *[{"params": self.best}] * self.keeps]
        for one, state in zip(self.saved, states, strict=True):
            one.save(self.done, state, meta)

    def close(self) -> None:
        """Finish the saves under way."""
        for one in self.saved:
            one.close()
