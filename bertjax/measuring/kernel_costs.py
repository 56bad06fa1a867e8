# SPDX-License-Identifier: Apache-2.0
"""What custom kernels cost, by formula: the compiler does not look into them."""

import math
from collections.abc import Sequence

from bertjax.measuring.hlo import Kernel
from bertjax.parallel.chips import Chip

# Matrix products of a splash attention kernel: scores, then context; backward the
# scores again, and the gradients of weights, q, k and v. Where the gradient of q has a
# kernel of its own, both make scores and the weights' gradient.
PRODUCTS = {"fwd": 2, "dkv": 5, "dkv beside dq": 4, "dq": 3}


def attention_flops(shape: Sequence[int], keys: float, products: int) -> float:
    """Count 2 operations an element of each product of attention.

    shape: of the queries, [..., H, L, K]; keys: how many a query looks at. With all L
    of them a forward pass is 4 L^2 K H a row, a backward pass 10 L^2 K H.
    """
    return 2.0 * products * math.prod(shape) * keys


def seconds(kernels: Sequence[Kernel], chip: Chip, share: float = 1.0) -> float:
    """Estimate the time of a step's kernels on a device.

    What a kernel says of itself counts; splash attention does not, and is counted by
    its shapes: `share` is the part of the keys that a query looks at, in the mean over
    the layers. Of any other kernel only the bytes are known.
    """
    own_dq = any("splash" in k.name and "_dq" in k.name for k in kernels)
    total = 0.0
    for kernel in kernels:
        flops, moved = kernel.flops, kernel.moved or kernel.touched
        if flops is None and "splash" in kernel.name:
            flops = _splash_flops(kernel, share, own_dq)
        total += kernel.times * chip.kernel_seconds(flops or 0.0, moved)
    return total


def _splash_flops(kernel: Kernel, share: float, own_dq: bool) -> float:
    which = next((p for p in ("fwd", "dkv", "dq") if f"_{p}" in kernel.name), "fwd")
    if which == "dkv" and own_dq:
        which = "dkv beside dq"
    queries = next((s for s in kernel.shapes if len(s) >= 4), None)
    if queries is None:
        return 0.0
    return attention_flops(queries, share * queries[-2], PRODUCTS[which])
