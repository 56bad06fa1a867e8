# SPDX-License-Identifier: Apache-2.0
"""Pooled vectors of sequences, compared with values by hand."""

import jax.numpy as jnp
import numpy as np

from bertjax.models.pooling import POOLINGS, first_tokens, means, normalize_vectors
from bertjax.tasks.task_type import POOLINGS as NAMED

X = jnp.arange(12.0).reshape(1, 6, 2)


def test_padding_counts_for_nothing():
    mask = jnp.array([[1, 1, 1, 0, 0, 0]])
    assert means(X, {"attention_mask": mask}).tolist() == [[2, 3]]
    assert first_tokens(X, {"attention_mask": mask}).tolist() == [[0, 1]]


def test_each_sequence_of_a_packed_row():
    batch = {
        "attention_mask": jnp.array([[1, 1, 1, 1, 1, 0]]),
        "segment_ids": jnp.array([[1, 1, 2, 2, 2, 0]]),
        "cls_positions": jnp.array([[0, 2, 0]]),
    }
    assert means(X, batch)[0, :2].tolist() == [[1, 2], [6, 7]]
    assert np.isfinite(means(X, batch)).all()  # also without a sequence
    assert first_tokens(X, batch)[0, :2].tolist() == [[0, 1], [4, 5]]


def test_names_are_known_where_jax_is_not():
    assert [*POOLINGS] == [*NAMED]


def test_vectors_of_length_1():
    np.testing.assert_allclose(
        normalize_vectors(jnp.array([[3.0, 4.0], [0.0, 0.0]])),
        [[0.6, 0.8], [0, 0]],
        atol=1e-6,
    )
