# SPDX-License-Identifier: Apache-2.0
"""Trees in bertjax's layout with layers of very different scales, so that a test fails
if the layers of a stacked leaf share one norm."""

import jax
import numpy as np

from bertjax.training.layerwise import is_stacked

LR, WD, B1, B2, EPS = 0.1, 0.02, 0.9, 0.99, 1e-6
SHAPES = {
    "encoder": {
        "embeddings": {"word": (7, 4), "norm": {"scale": (4,)}},
        "layers": {
            "attention": {
                "query": {"kernel": (3, 4, 2, 3), "bias": (3, 2, 3)},
                "output": {"kernel": (3, 2, 3, 4)},
            },
            "mlp": {"up": {"kernel": (3, 4, 6)}, "norm": {"scale": (2, 4)}},
        },
    },
    "mlm": {"transform": {"kernel": (4, 4)}, "bias": (7,)},
}


def is_shape(x):
    return isinstance(x, tuple)


def draw(seed, shapes=SHAPES):
    normal = np.random.default_rng(seed).normal

    def one(path, shape):
        x = normal(size=shape)
        if is_stacked(path):
            x *= 10.0 ** np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        return x.astype(np.float32)

    return jax.tree_util.tree_map_with_path(one, shapes, is_leaf=is_shape)
