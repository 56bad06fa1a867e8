# SPDX-License-Identifier: Apache-2.0
"""Compile the train and eval steps of a config for devices that are not present."""

import contextlib
import functools
import hashlib
import json
import math
import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.assembly import resolve, train_step
from bertjax.assembly.open_teacher import make_measured_objective
from bertjax.checkpoints.workdir import read_json
from bertjax.config import schema, serialize
from bertjax.data.features.base import Spec, encoder_length
from bertjax.measuring import hlo, memory_analysis, topologies
from bertjax.measuring.memory_analysis import PROGRAM_BYTES
from bertjax.measuring.synthetic_data import Shape, batch_specs
from bertjax.models import attention
from bertjax.parallel import feed
from bertjax.parallel.chips import CHIPS, Chip
from bertjax.parallel.mesh import make_mesh
from bertjax.parallel.sharding import batch_sharding
from bertjax.storage.atomic import write_file
from bertjax.storage.paths import expand
from bertjax.training import multi_step, state


class Target:
    """A config on a mesh of devices that need not exist.

    objectives, cfgs, updates: of each phase's objective, by its name in phases,
    with its encoder's config; "" is the config's own, also available as
    `objective` and `update`.

    Raises UserError if mesh and config do not go together.
    """

    def __init__(
        self, config: ConfigDict, vocab_size: int, topology: str, devices: Sequence[Any]
    ) -> None:
        self.config, self.vocab_size, self.topology = config, vocab_size, topology
        self.mesh: Mesh = make_mesh(**config.mesh, devices=list(devices))
        cfg = resolve.encoder_config(config, vocab_size, backend="tpu")
        names = resolve.names_of(config)
        pairs = [make_measured_objective(config, cfg, name) for name in names]
        self.cfgs = {n: cfg for n, (_, cfg) in zip(names, pairs, strict=True)}
        joined = train_step.join_objectives([objective for objective, _ in pairs])
        self.objectives = dict(zip(names, joined, strict=True))
        self.updates = {}
        for name, objective in self.objectives.items():
            resolve.check_plan(config, objective.needs)
            how = self.mesh, *train_step.ENDLESS
            self.updates[name] = train_step.make_update(config, objective, *how)
        self.objective, self.update = self.objectives[""], self.updates[""]
        self.hosts = len({d.process_index for d in devices})
        self.evaluations: dict[str, dict[str, Any]] = {}
        # Compilation results are cached on this machine.
        is_local = "://" not in config.data.cache
        cache = config.data.cache if is_local else schema.base().data.cache
        self.cache = expand(cache, "data.cache") / "compiled"

    @property
    def chip(self) -> Chip:
        """The data sheet of the devices. Raises UserError for an unknown kind."""
        kind = self.mesh.devices.flat[0].device_kind
        if kind not in CHIPS or not CHIPS[kind].ghz:
            raise UserError(
                f"--topology={self.topology}: memory and clock of {kind} are not known"
            )
        return CHIPS[kind]

    @property
    def parts(self) -> int:
        """The number of parts into which the mesh splits the rows of a batch."""
        return math.prod(self.mesh.shape[axis] for axis in ("data", "fsdp"))

    def rows(self, shape: Shape) -> int:
        """Return the rows that a device has in memory at once."""
        return shape.batch_size // self.config.accumulate // self.parts

    def shapes(self) -> list[Shape]:
        """Return the distinct shapes of the run's phases, beginning with the longest.

        Raises UserError if the mesh does not divide a batch.
        """
        planned = resolve.wanted_phases(self.config)
        for objective in self.objectives.values():
            how = self.config.accumulate, objective.group
            for size in (self.config.batch_size, *(p.batch_size for p in planned)):
                feed.check_batch_size(self.mesh, size, *how)
        rates: dict[tuple[int, int, str], dict[Any, None]] = {}
        for phase in planned:
            key = phase.batch_size, phase.length, phase.objective
            rates.setdefault(key, {})[phase.mask_rate] = None
        shapes = [Shape(b, n, (*of,), name) for (b, n, name), of in rates.items()]
        return sorted(shapes, key=lambda s: (-s.length, -s.batch_size))

    @property
    def eval_shape(self) -> Shape:
        """The batches of an evaluation, which do not depend on the phase."""
        rates = (resolve.eval_mask_rate(self.config),)
        return Shape(self.config.batch_size, self.config.data.length, rates)

    def specs(self, shape: Shape) -> dict[str, Spec]:
        """Return the specs of all arrays of a batch, without the batch axis."""
        return batch_specs(self.config, self.objectives[shape.objective], shape)

    def arrays(self, shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape and dtype of each array of a batch [B, ...]."""
        return {
            name: jax.ShapeDtypeStruct((shape.batch_size, *spec.shape), spec.dtype)
            for name, spec in self.specs(shape).items()
        }

    def tokens(self, shape: Shape) -> int:
        """Return the token slots of a batch, over all choices of a row."""
        return shape.batch_size * math.prod(self.specs(shape)["input_ids"].shape)

    def attention(self, shape: Shape) -> str:
        """Name the attention backend of a step, with the reason for it."""
        with jax.set_mesh(self.mesh):
            arrays = self.specs(shape)
            cfg, length = self.cfgs[shape.objective], shape.length
            lengths = [encoder_length(length, arrays)]
            return attention.describe_backend(cfg, lengths, arrays)

    def evaluation(self, objective: str) -> dict[str, Any]:
        """Return the result of `memory` for an evaluation of a phase's objective."""
        if objective not in self.evaluations:
            shape = self.eval_shape._replace(objective=objective)
            self.evaluations[objective] = self.memory("eval", shape)
        return self.evaluations[objective]

    def state_parts(self) -> dict[str, int]:
        """Return a device's bytes of "parameters", "optimizer" and, if any, "frozen".

        Frozen are parts of the model, and a teacher.
        """
        shapes, shardings = self.update.shapes, self.update.shardings
        parameters = shard_bytes(shapes.params, shardings.params)
        frozen = shard_bytes(shapes.frozen, shardings.frozen)
        state = shard_bytes(shapes, shardings)
        parts = {"parameters": parameters, "optimizer": state - parameters - frozen}
        return parts | ({"frozen": frozen} if frozen else {})

    def lower(self, step: str, shape: Shape) -> Any:
        """Trace the "train" step, or the "eval" step of micro-batches of this shape.

        With steps_per_call the train step has all updates of a call (multi_step.py).
        """
        given = state.with_shardings(self.update.shapes, self.update.shardings)
        config, where = self.config, batch_sharding(self.mesh)
        objective = self.objectives[shape.objective]
        update = self.updates[shape.objective]
        with jax.set_mesh(self.mesh):
            if step == "eval":
                rows = shape.batch_size // config.accumulate
                rows = objective.whole_batch or rows
                specs = self.arrays(shape._replace(batch_size=rows))
                specs["example_weights"] = jax.ShapeDtypeStruct((rows,), jnp.float32)
                evaluate = jax.jit(train_step.make_evaluate(objective))
                batch = self._place(specs, where)
                return evaluate.lower(given.params, batch, given.frozen)
            specs = self.arrays(shape)
            if config.steps_per_call == 1:
                return update.step.lower(given, self._place(specs, where))
            where = multi_step.call_sharding(self.mesh)
            batch = self._place(specs, where, config.steps_per_call)
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            batch["count"] = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
            return update.many.lower(given, batch)

    def _place(
        self, specs: dict[str, jax.ShapeDtypeStruct], where: NamedSharding, *steps: int
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Add shardings to the arrays of a batch, and the flag for several hosts.

        steps: the number of steps per call as the first axis, if there are several.
        """
        batch = {
            name: jax.ShapeDtypeStruct(
                (*steps, *spec.shape), spec.dtype, sharding=where
            )
            for name, spec in specs.items()
        }
        if self.hosts > 1:  # like feed.with_flag
            where = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
            batch["stop"] = jax.ShapeDtypeStruct(
                (self.mesh.devices.size,), jnp.int32, sharding=where
            )
        return batch

    def facts(self, step: str, shape: Shape) -> dict[str, Any]:
        """Compile a step, or look up the result of an earlier compilation.

        Returns the result of memory_analysis.compile_lowered, with hlo.Kernel for
        kernels. Results are cached in data.cache, by program, topology and compiler.
        """
        lowered = self.lower(step, shape)
        file = self._file(lowered)
        if not (facts := read_json(file)):
            facts = memory_analysis.compile_lowered(lowered)
            _save(file, facts)
        used = memory_analysis.memory_bytes(facts) or 0
        facts["fits"] = facts["fits"] and used <= self.chip.hbm_bytes
        facts["kernels"] = [hlo.Kernel(**k) for k in facts.get("kernels", ())]
        return facts

    def is_compiled(self, step: str, shape: Shape) -> bool:
        """Return whether `facts` needs no compilation."""
        return self._file(self.lower(step, shape)).exists()

    def memory(
        self, step: str, shape: Shape, program: int = PROGRAM_BYTES
    ) -> dict[str, Any]:
        """Return what is known after seconds, where `facts` takes minutes.

        The result has `needed` bytes without the program's code; whether the step
        `fits` with its code, for which `program` bytes are reserved if its size is
        unknown; whether it is `refused` even without the code; and collectives.
        """
        file = self._file(self.lower(step, shape))
        early_file = file.with_suffix(".memory.json")
        whole = read_json(file)
        early = memory_analysis.early_facts(whole) if whole else read_json(early_file)
        if "collectives" not in early:  # none, or cached by an older version
            compile_step = functools.partial(
                _compile, serialize.to_json(self.config), self.vocab_size,
                self.topology, step, shape,
            )  # fmt: skip
            early = memory_analysis.compile_early(compile_step)
            _save(early_file, early)
        program = whole.get("program", program)
        # The compiler also reports the memory of programs that it then refuses.
        needed, most = early["needed"] or 0, self.chip.hbm_bytes
        fits = early["fits"] and needed + program <= most
        refused = not early["fits"] or needed > most
        return {**early, "fits": fits, "refused": refused}

    def _file(self, lowered: Any) -> Path:
        options = (os.environ.get(k, "") for k in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))
        parts = (self.topology, *versions().values(), " ".join(options))
        key = "".join((*parts, lowered.as_text())).encode()
        return self.cache / f"{hashlib.sha256(key).hexdigest()}.json"


def _compile(
    config: str,
    vocab_size: int,
    topology: str,
    step: str,
    shape: Shape,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Compile a step in a process that gets the config only as JSON."""
    devices = topologies.find_devices(topology)
    target = Target(serialize.from_json(config), vocab_size, topology, devices)
    return memory_analysis.compile_lowered(target.lower(step, shape), options)


def shard_bytes(shapes: Any, shardings: Any) -> int:
    """Add up the bytes of a tree's shards on one device."""
    return sum(
        math.prod(where.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, where in zip(
            jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True
        )
    )


def versions() -> dict[str, str]:
    """Return the versions that compilation results depend on."""
    return {name: metadata.version(name) for name in ("jax", "libtpu")}


def _save(file: Path, facts: dict[str, Any]) -> None:
    """Write a compilation result; if that fails, it is compiled again next time."""
    with contextlib.suppress(UserError):
        write_file(file, json.dumps(facts), str(file))
