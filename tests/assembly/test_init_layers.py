# SPDX-License-Identifier: Apache-2.0
"""Which layers of a deeper model initialize a shallower one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertjax import UserError
from bertjax.assembly.init_layers import ChosenLayers, even_layers, read_layers

KERNEL, NORM = "encoder/layers/mlp/up/kernel", "encoder/layers/attention/norm/scale"
TYPES, WORD = "encoder/embeddings/token_type", "encoder/embeddings/word"


class Model:
    """A model of 12 layers, the first without a norm; values are the layer's number."""

    def __init__(self, depth=12):
        each = np.arange(depth, dtype=np.float32)
        self.leaves = {
            WORD: np.ones((5, 2), np.float32),
            TYPES: np.ones((2, 2), np.float32),
            KERNEL: np.broadcast_to(each[:, None, None], (depth, 2, 3)),
            NORM: np.broadcast_to(each[1:, None], (depth - 1, 2)),
        }
        self.read = self.leaves.__getitem__

    def describe(self):
        return {name: leaf.shape for name, leaf in self.leaves.items()}


def shapes(depth):
    return {WORD: (5, 2), KERNEL: (depth, 2, 3), NORM: (depth - 1, 2)}


def test_published_layers():
    assert even_layers(12, 6) == [0, 2, 4, 7, 9, 11]
    assert even_layers(4, 2) == [0, 3]
    assert even_layers(2, 1) == [0] and even_layers(3, 3) == [0, 1, 2]


@given(st.integers(1, 48), st.integers(1, 48))
def test_even_layers_ascend_from_the_first_to_the_last(depth, count):
    count = min(depth, count)
    layers = even_layers(depth, count)
    assert sorted({*layers}) == layers and len(layers) == count
    assert layers[0] == 0 and (count == 1 or layers[-1] == depth - 1)


def test_skips_that_half_of_the_layers_have():
    """Each layer of a student has the skip weight of its source layer."""
    skips, model = "encoder/layers/unet_skips/early", Model()
    model.leaves[skips] = np.arange(6, 12)
    chosen = ChosenLayers(model, "even", {**shapes(6), skips: (3,)})
    assert chosen.describe() == {**shapes(6), skips: (3,)}
    assert chosen.read(skips).tolist() == [7, 9, 11]
    # Layer 3 has no skip weight, so only two are there for the student's three layers.
    chosen = ChosenLayers(model, "0,1,2,3,10,11", {**shapes(6), skips: (3,)})
    assert chosen.describe()[skips] == (2,)


@pytest.mark.parametrize(
    "text, layers",
    [("even", [0, 2, 4, 7, 9, 11]), ("0,1,2,9,10,11", [0, 1, 2, 9, 10, 11])],
)
def test_leaves_of_the_layers(text, layers):
    chosen = ChosenLayers(Model(), text, shapes(6))
    assert chosen.describe() == shapes(6)  # without token types
    assert chosen.read(KERNEL)[:, 0, 0].tolist() == layers
    # A student's second layer has the norm of its source layer.
    assert chosen.read(NORM)[:, 0].tolist() == layers[1:]
    assert chosen.read(WORD).shape == (5, 2)
    assert ChosenLayers(Model(), text, shapes(6) | {TYPES: (2, 2)}).describe()[TYPES]


@pytest.mark.parametrize(
    "text, depth, words",
    [
        ("odd", 6, "neither 'even' nor layer numbers"),
        ("0,1", 6, "names 2 layers, and the model has 6"),
        ("0,12", 2, "from 0 to 11"),
        ("even", 13, "has 12 layers, this model 13"),
    ],
)
def test_what_is_refused(text, depth, words):
    with pytest.raises(UserError, match=words):
        ChosenLayers(Model(), text, shapes(depth))
    assert read_layers("even") is None
