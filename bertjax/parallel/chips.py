# SPDX-License-Identifier: Apache-2.0
"""Peak rates and memory of accelerators, by jax's device_kind."""

from typing import NamedTuple


class Chip(NamedTuple):
    """A chip's data sheet, and how jax presents it.

    devices: the number of jax devices per chip (1 for v4 and v5p, whose two cores work
    together). hbm_gib: the memory of a device that a program may use, as the TPU
    compiler reports it. ghz: the clock; for TPUs it is computed as the peak divided by
    the operations of the matrix units per cycle.
    """

    tflops: float  # dense bf16 peak
    hbm_gbps: float
    hbm_gib: float = 0.0
    ghz: float = 0.0
    devices: int = 1

    @property
    def flops(self) -> float:
        """The peak of one device, FLOP/s."""
        return 1e12 * self.tflops / self.devices

    @property
    def hbm_bytes(self) -> float:
        """The memory of one device that a program may use, bytes."""
        return self.hbm_gib * 2**30

    def kernel_seconds(self, flops: float, moved: float) -> float:
        """Estimate the seconds of a kernel that is opaque to the compiler, on a device.

        A good kernel is assumed to reach half of the peak, or 0.8 of the memory
        bandwidth for the bytes `moved`.
        """
        rate = 1e9 * self.hbm_gbps / self.devices
        return max(flops / (0.5 * self.flops), moved / (0.8 * rate))


CHIPS = {
    "TPU v2": Chip(45, 700, devices=2),
    "TPU v3": Chip(123, 900, devices=2),
    "TPU v4": Chip(275, 1228, 30.75, 1.05),
    "TPU v5 lite": Chip(197, 819, 15.75, 1.5),
    "TPU v5": Chip(459, 2765, 95.73, 1.75),
    "TPU v5p": Chip(459, 2765, 95.73, 1.75),
    "TPU v6 lite": Chip(918, 1640, 31.24, 1.75),
    "TPU7x": Chip(2307, 7380, 94.74, 2.2, devices=2),
    "NVIDIA A100-SXM4-40GB": Chip(312, 1555),
    "NVIDIA A100-SXM4-80GB": Chip(312, 2039),
    "NVIDIA H100 80GB HBM3": Chip(989, 3350),
    "NVIDIA H200": Chip(989, 4800),
}
