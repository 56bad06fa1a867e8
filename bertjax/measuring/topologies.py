# SPDX-License-Identifier: Apache-2.0
"""Describe TPU slices that are not present, for the TPU compiler."""

import importlib.util
import os
import re
from typing import Any

from bertjax import RunError, UserError

# Shapes that are offered and known to the compiler, up to 256 chips.
FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
DEEP = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")
SHAPES = {"v4": DEEP, "v5e": FLAT, "v5p": DEEP, "v6e": FLAT, "tpu7x": DEEP}
# Two cores of a v4 are one device, as in jax.
OPTIONS: dict[str, dict[str, Any]] = {"v4": {"chip_config_name": "megacore"}}
EXAMPLES = "v4:2x2x1, v5e:2x4, v5p:2x2x2, v6e:8x8, tpu7x:2x2x1, two slices: 2xv5e:4x4"
DEFAULT = "v5e:2x4"

# Settings to compile without a TPU: no queries to a metadata server, several processes
# at once, and no log output of the compiler.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # jax's own cache cannot return programs for devices that do not exist here.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    # Without source lines, a program's text, which is the cache key, is what it does.
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
}


def prepare() -> None:
    """Set up the TPU compiler; call this before jax is imported.

    Raises UserError if it is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "the TPU compiler is not installed (no TPU is needed, Linux on x86-64 is): "
            "pip install libtpu"
        )
    os.environ.update(ENVIRONMENT)


def parse(name: str) -> tuple[int, str, dict[str, Any]]:
    """Parse "2xv5e:4x4": the number of slices, one slice, more options of the compiler.

    Raises UserError with examples.
    """
    match = re.fullmatch(
        r"(?:(\d+)x)?([a-z]\w*):([1-9]\d*(?:x[1-9]\d*){1,2})", name.strip()
    )
    if not match:
        raise UserError(f"--topology={name} is not GENERATION:SHAPE: {EXAMPLES}")
    slices, generation, shape = match.groups()
    if generation not in SHAPES:
        raise UserError(
            f"--topology={name} is none of {', '.join(SHAPES)}; for instance {EXAMPLES}"
        )
    if slices == "0":
        raise UserError(f"--topology={name}: there must be a slice")
    return int(slices or 1), f"{generation}:{shape}", OPTIONS.get(generation, {})


def find_devices(name: str) -> list[Any]:
    """Return the devices of a topology, for which programs can be compiled.

    Raises UserError for a shape that the compiler refuses, RunError if it fails.
    """
    slices, topology, options = parse(name)
    from jax.experimental import topologies

    if slices > 1:
        options = {**options, "num_slices": slices}
    try:
        description = topologies.get_topology_desc(
            platform="tpu", topology_name=topology, **options
        )
    except Exception as e:  # of several types, raised deep in libtpu
        generation, shape = topology.split(":")
        if shape in SHAPES[generation]:
            why = " ".join(str(e).split())
            raise RunError(f"--topology={name}: the compiler failed: {why}") from e
        shapes = " ".join(SHAPES[generation])
        raise UserError(
            f"--topology={name}: there is no such slice; {generation} has {shapes}"
        ) from e
    return list(description.devices)
