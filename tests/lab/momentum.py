# SPDX-License-Identifier: Apache-2.0
"""An optimizer from outside the package: momentum and decoupled weight decay."""

import optax


def make_optimizer(wd, decay: float = 0.9, nesterov: bool = False):
    return [optax.trace(decay, nesterov), optax.add_decayed_weights(wd)]
