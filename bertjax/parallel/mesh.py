# SPDX-License-Identifier: Apache-2.0
"""The mesh of devices: data, fsdp and tensor axes."""

import math
import resource
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from bertjax import UserError, counted
from bertjax.parallel.chips import CHIPS

AXES = ("data", "fsdp", "tensor")


def make_mesh(
    data: int = -1, fsdp: int = 1, tensor: int = 1, devices: list | None = None
) -> Mesh:
    """Lay devices out as (data, fsdp, tensor); one axis may be -1: all that remain.

    Axis types are Auto: the compiler propagates shardings. If the devices are in
    several TPU slices, only the data axis crosses the slower network between them. GPUs
    are laid out machine by machine, so that the last axes stay within one machine if
    they fit; otherwise they may span several.
    Raises UserError if the product of the axes is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [data, fsdp, tensor]
    axes = f"mesh data={data} fsdp={fsdp} tensor={tensor}"
    have = counted(len(devices), "device")
    if sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
        raise UserError(f"{axes}: axes are positive, and one of them may be -1")
    known = math.prod(s for s in sizes if s != -1)
    if -1 in sizes:
        if len(devices) % known:
            raise UserError(f"{axes}: {known} does not divide {have}")
        sizes[sizes.index(-1)] = len(devices) // known
    elif known != len(devices):
        verb = "is" if len(devices) == 1 else "are"
        raise UserError(
            f"{axes}: asks for {counted(known, 'device')}, there {verb} {len(devices)}"
        )
    # For GPUs and CPUs jax's slice_index is the machine.
    tpu = devices[0].platform == "tpu"
    slices = len({getattr(d, "slice_index", 0) for d in devices}) if tpu else 1
    if sizes[0] % slices:
        raise UserError(
            f"{axes}: mesh.data must be a multiple of the {slices} slices, over which "
            "no other axis goes"
        )
    # A mesh axis may use a part of a physical axis: 2 of the 4 x 4.
    how: dict[str, Any] = {"devices": devices, "allow_split_physical_axes": True}
    try:
        if not tpu:
            ordered = sorted(devices, key=lambda d: getattr(d, "slice_index", 0))
            laid_out = np.asarray(ordered).reshape(sizes)
        elif slices == 1:
            laid_out = mesh_utils.create_device_mesh(sizes, **how)
        else:
            inner, outer = (sizes[0] // slices, *sizes[1:]), (slices, 1, 1)
            laid_out = mesh_utils.create_hybrid_device_mesh(inner, outer, **how)
    except NotImplementedError as e:
        raise UserError(f"{axes}: these chips cannot be laid out so: {e}") from e
    return Mesh(laid_out, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def peak_flops(mesh: Mesh) -> float | None:
    """Return the mesh's bf16 peak in FLOP/s; None for a chip that is not listed."""
    chip = CHIPS.get(mesh.devices.flat[0].device_kind)
    return None if chip is None else chip.flops * mesh.devices.size


def peak_memory(mesh: Mesh) -> int:
    """Return the most bytes in use so far on the fullest device of this process.

    If the devices (CPUs) do not report it, return the peak memory of the process.
    """
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    if all("peak_bytes_in_use" in s for s in stats):
        return max(s["peak_bytes_in_use"] for s in stats)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def machine(mesh: Mesh) -> dict[str, Any]:
    """Return the entries of run.json about the devices."""
    return {
        "mesh": dict(mesh.shape),
        "devices": mesh.devices.size,
        "processes": jax.process_count(),
        "device_kind": mesh.devices.flat[0].device_kind,
    }
