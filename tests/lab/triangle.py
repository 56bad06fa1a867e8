# SPDX-License-Identifier: Apache-2.0
"""A schedule from outside the package: the rate falls to 0 in each of some cycles."""

import jax.numpy as jnp


def make_schedule(warmup, total, cycles: int = 1):
    def share(step):
        over = jnp.maximum(step - warmup, 0) / (total - warmup)
        return 1.0 - jnp.mod(over * cycles, 1.0)

    return share
