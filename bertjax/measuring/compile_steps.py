# SPDX-License-Identifier: Apache-2.0
"""The train and the eval step of a config, compiled for devices that are not there."""

import contextlib
import functools
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections.config_dict import ConfigDict

from bertjax import UserError
from bertjax.assembly import batches, resolve, train_step
from bertjax.config import schema
from bertjax.measuring import hlo, memory_analysis
from bertjax.measuring.memory_analysis import PROGRAM
from bertjax.models import attention
from bertjax.models.config import EncoderConfig
from bertjax.objectives.base import Objective, make_objective
from bertjax.parallel import feed
from bertjax.parallel.chips import CHIPS, Chip
from bertjax.parallel.mesh import make_mesh
from bertjax.parallel.sharding import batch_sharding
from bertjax.storage.atomic import write_file
from bertjax.training import multi_step, state

# Far from the end of any schedule: the arithmetic of a step is always the same.
WARMUP, TOTAL = 10_000, 1_000_000


class Shape(NamedTuple):
    """A batch: B rows of L tokens with P predictions each."""

    batch_size: int
    length: int
    predictions: int


class Parts(NamedTuple):
    """Bytes of the state on the device that holds most of it, by the shardings."""

    parameters: int
    optimizer: int


class Target:
    """A config on a mesh of devices that need not exist.

    Raises UserError when mesh and config do not go together.
    """

    def __init__(
        self, config: ConfigDict, vocab_size: int, topology: str, devices: Sequence[Any]
    ) -> None:
        self.config, self.vocab_size, self.topology = config, vocab_size, topology
        self.mesh: Mesh = make_mesh(**config.mesh, devices=list(devices))
        cfg = resolve.encoder_config(config, vocab_size, backend="tpu")
        made: tuple[Objective, EncoderConfig] = make_objective(config.objective, cfg)
        self.objective, self.cfg = made
        resolve.check_plan(config, self.objective.needs)
        self.hosts = len({d.process_index for d in devices})
        self.update = train_step.make_update(
            config, self.objective, self.mesh, WARMUP, TOTAL
        )
        # What was compiled is kept on this machine.
        here = "://" not in config.data.cache
        cache = config.data.cache if here else schema.base().data.cache
        self.cache = Path(cache).expanduser() / "compiled"

    @property
    def chip(self) -> Chip:
        """What is known of the devices. Raises UserError where that is nothing."""
        kind = self.mesh.devices.flat[0].device_kind
        if kind not in CHIPS or not CHIPS[kind].ghz:
            raise UserError(f"--topology={self.topology}: nothing is known of {kind}")
        return CHIPS[kind]

    @property
    def parts(self) -> int:
        """Into how many parts the mesh splits the rows of a batch."""
        return math.prod(self.mesh.shape[axis] for axis in ("data", "fsdp"))

    def rows(self, shape: Shape) -> int:
        """Return the rows of a device that are in memory at once."""
        return shape.batch_size // self.config.accumulate // self.parts

    def shapes(self) -> list[Shape]:
        """Return the distinct shapes of the run's phases, the longest first.

        Raises UserError when the mesh does not divide a batch.
        """
        feed.check_batch_size(self.mesh, self.config.batch_size, self.config.accumulate)
        found: dict[tuple[int, int], int] = {}
        for phase in resolve.wanted_phases(self.config):
            feed.check_batch_size(self.mesh, phase.batch_size, self.config.accumulate)
            key = phase.batch_size, phase.length
            wanted = batches.predictions(self.config, phase.length, phase.mask_rate)
            found[key] = max(found.get(key, 0), wanted)
        shapes = [Shape(*key, predictions) for key, predictions in found.items()]
        return sorted(shapes, key=lambda s: (-s.length, -s.batch_size))

    def tokens(self, shape: Shape) -> int:
        """Return the token slots of a batch: of all choices of a row."""
        arrays = batch_arrays(self.config, self.objective, shape)
        return math.prod(arrays["input_ids"][0])

    def attention(self, shape: Shape) -> str:
        """Say which backend attends in a step, and why no other."""
        with jax.set_mesh(self.mesh):
            return attention.describe_backend(self.cfg, [shape.length])

    @property
    def eval_shape(self) -> Shape:
        """The batches of an evaluation, whatever phases make of the run's own.

        `rows` of it are in memory at once, as of the run's.
        """
        length = self.config.data.length
        wanted = batches.predictions(self.config, length, self.config.eval.mask_rate)
        return Shape(self.config.batch_size, length, wanted)

    @functools.cached_property
    def evaluation(self) -> dict[str, Any]:
        """What `memory` says of an evaluation."""
        return self.memory("eval", self.eval_shape)

    def state_parts(self) -> Parts:
        """Return the bytes of parameters and of the optimizer's state on a device."""
        one = self.update.shapes, self.update.shardings
        parameters = shard_bytes(one[0].params, one[1].params)
        return Parts(parameters, shard_bytes(*one) - parameters)

    def lower(self, step: str, shape: Shape) -> Any:
        """Trace the "train" step, or the "eval" step of micro-batches of this shape.

        The first is all updates of a call where there are several (dispatch.py).
        """
        given = state.with_shardings(self.update.shapes, self.update.shardings)
        most = self.config.steps_per_call
        with jax.set_mesh(self.mesh):
            if step == "train" and most > 1:
                batch = self._batch(shape, most)
                return self.update.many.lower(given, batch)
            if step == "train":
                return self.update.step.lower(given, self._batch(shape))
            rows = shape.batch_size // self.config.accumulate
            rows = self.objective.whole_batch or rows
            batch = self._batch(shape._replace(batch_size=rows))
            batch["example_weights"] = self._array((rows,), jnp.float32)
            made = train_step.make_evaluate(self.objective)
            return jax.jit(made).lower(given.params, batch)

    def _batch(self, shape: Shape, most: int = 1) -> dict[str, Any]:
        """Make the shapes of a batch, or of the `most` batches of a call."""
        batch = {
            name: self._array(dims, dtype, most)
            for name, (dims, dtype) in batch_arrays(
                self.config, self.objective, shape
            ).items()
        }
        if most > 1:
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            batch["count"] = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
        if self.hosts > 1:  # as feed.with_flag does
            where = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
            batch["stop"] = jax.ShapeDtypeStruct(
                (self.mesh.devices.size,), jnp.int32, sharding=where
            )
        return batch

    def _array(
        self, shape: tuple[int, ...], dtype: Any, most: int = 1
    ) -> jax.ShapeDtypeStruct:
        if most > 1:
            where = multi_step.call_sharding(self.mesh)
            return jax.ShapeDtypeStruct((most, *shape), dtype, sharding=where)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding(self.mesh))

    def facts(self, step: str, shape: Shape) -> dict[str, Any]:
        """Compile a step, or look up what compiling gave: plain values.

        fits; if so the bytes of memory_analysis() and hlo.summary(); if not, `needed`
        bytes (None where the compiler does not say). Kept in data.cache, by the
        program, the topology and the compiler.
        """
        lowered = self.lower(step, shape)
        file = self._file(lowered)
        found = _kept(file)
        if found is None:
            found = compile_lowered(lowered)
            _keep(file, found)
        used = memory_bytes(found) or 0
        found["fits"] = found["fits"] and used <= self.chip.hbm_bytes
        found["kernels"] = [
            hlo.Kernel(**{**k, "shapes": tuple(tuple(s) for s in k["shapes"])})
            for k in found.get("kernels", ())
        ]
        return found

    def is_compiled(self, step: str, shape: Shape) -> bool:
        """True where `facts` needs no compiling."""
        return self._file(self.lower(step, shape)).exists()

    def memory(self, step: str, shape: Shape, program: int = PROGRAM) -> dict[str, Any]:
        """Return what is known in seconds, where `facts` takes minutes.

        `needed` bytes without the program's code; whether it `fits` with it, for which
        `program` bytes are left where it is not known, or is `refused` even without;
        collectives.
        """
        file = self._file(self.lower(step, shape))
        early = file.with_suffix(".memory.json")
        found = whole = _kept(file)
        found = early_facts(whole) if whole else _kept(early)
        if found is None or "collectives" not in found:  # kept by an older version
            found = memory_analysis.needed(
                self.config, self.vocab_size, self.topology, step, shape
            )
            _keep(early, found)
        program = (whole or {}).get("program", program)
        # The compiler reports what it then refuses, too.
        needed, most = found["needed"] or 0, self.chip.hbm_bytes
        fits = found["fits"] and needed + program <= most
        refused = not found["fits"] or needed > most
        return {**found, "fits": fits, "refused": refused}

    def _file(self, lowered: Any) -> Path:
        key = hashlib.sha256()
        for part in (self.topology, *versions().values(), _flags(), lowered.as_text()):
            key.update(part.encode())
        return self.cache / f"{key.hexdigest()}.json"


def compile_lowered(
    lowered: Any, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Compile and return what Target.facts keeps; options: of the compiler."""
    begun = time.perf_counter()
    try:
        made = lowered.compile(options)
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        seconds = time.perf_counter() - begun
        needed = needed_bytes(str(e))
        return {"fits": False, "needed": needed, "compile_seconds": seconds}
    sizes = made.memory_analysis()
    return {
        "fits": True,
        "arguments": sizes.argument_size_in_bytes,
        "temporaries": sizes.temp_size_in_bytes,
        "outputs": sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        "program": sizes.generated_code_size_in_bytes,
        "compile_seconds": time.perf_counter() - begun,
        **hlo.summary(made.as_text()),
    }


def early_facts(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return of what compiling gave what the compiler knows early (memory.needed)."""
    needed = memory_bytes(found)
    if needed is not None:
        needed -= found.get("program", 0)
    known = {"fits": found["fits"], "needed": needed}
    return known | {"collectives": found.get("collectives", {})}


def memory_bytes(facts: Mapping[str, Any]) -> int | None:
    """Return the bytes of a device that a program takes, its inputs included."""
    if "needed" in facts:
        return facts["needed"]
    names = ("arguments", "temporaries", "outputs", "program")
    return sum(facts[name] for name in names)


def needed_bytes(message: str) -> int | None:
    """Read out of the compiler's refusal how much memory the program needs.

    >>> needed_bytes("required for HLO temporaries (2.50G) exceeds available HBM (1G)")
    2684354560
    """
    match = re.search(
        r"\(([\d.]+)([KMGT]?)\) exceeds available|Used ([\d.]+)([KMGT]?) of", message
    )
    if not match:
        return None
    number, unit = match[1] or match[3], match[2] or match[4] or ""
    return int(float(number) * 1024 ** " KMGT".index(unit or " "))


def batch_arrays(
    config: ConfigDict, objective: Objective, shape: Shape
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return shapes and types of the arrays of a batch, as data/batches.py makes them.

    Of what the objective needs, a pair rule ("nsp") gives nsp_labels.
    """
    b, length, p = shape
    tokens = (b, length), jnp.int32
    arrays: dict[str, tuple[tuple[int, ...], Any]] = dict.fromkeys(
        ("input_ids", "attention_mask", "token_type_ids"), tokens
    )
    labels: tuple[int, ...] = (b,)
    if config.data.packed:
        labels = b, config.data.max_segments or max(4, length // 16)
        arrays |= dict.fromkeys(("segment_ids", "position_ids"), tokens)
        arrays["cls_positions"] = labels, jnp.int32
        arrays["cls_weights"] = labels, jnp.float32
    if "mlm" in objective.needs:
        for name in ("mlm_positions", "mlm_ids"):
            arrays[name] = (b, p), jnp.int32
        arrays["mlm_weights"] = (b, p), jnp.float32
    for rule in objective.needs - {"mlm", "labels"}:
        arrays[f"{rule}_labels"] = labels, jnp.int32
    own = objective.labels(b, length).items()
    return arrays | {name: (array.shape, array.dtype) for name, array in own}


def shard_bytes(shapes: Any, shardings: Any) -> int:
    """Add up the bytes of a tree's shards on one device."""
    return sum(
        math.prod(where.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, where in zip(
            jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True
        )
    )


def versions() -> dict[str, str]:
    """Return the versions that decide what a compiler says."""
    return {name: metadata.version(name) for name in ("jax", "libtpu")}


def _flags() -> str:
    return " ".join(os.environ.get(k, "") for k in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"))


def _kept(file: Path) -> dict[str, Any] | None:
    """Read what was kept; None where nothing whole was."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def _keep(file: Path, found: dict[str, Any]) -> None:
    """Write what compiling gave; without a place to write it is computed again."""
    plain = {**found, "kernels": [dict(k) for k in found.get("kernels", ())]}
    with contextlib.suppress(OSError):
        write_file(file, json.dumps(plain))
