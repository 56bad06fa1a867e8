# SPDX-License-Identifier: Apache-2.0
"""The packed file: exact round trips, and the layout and number of bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from bertjax import UserError
from bertjax.compression import packed, quantize, sparse
from bertjax.compression.packed import Form


@given(st.sampled_from([8, 4, 3]), st.data())
def test_bits_there_and_back(bits, data):
    values = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=80))
    words = packed.pack_bits(np.array(values, np.uint8), bits)
    assert words.dtype == np.uint32 and len(words) == -(-len(values) * bits // 32)
    assert packed.unpack_bits(words, bits, len(values)).tolist() == values


def test_many_are_packed_in_parts(monkeypatch):
    values = np.random.default_rng(0).integers(0, 8, 1000).astype(np.uint8)
    whole = packed.pack_bits(values, 3)
    monkeypatch.setattr(packed, "CODES", 64)
    np.testing.assert_array_equal(packed.pack_bits(values, 3), whole)
    np.testing.assert_array_equal(packed.unpack_bits(whole, 3, 1000), values)


def test_three_bits_lie_in_a_row():
    """32 codes of 3 bits fill 3 words; the eleventh crosses the first word's end."""
    values = np.zeros(32, np.uint8)
    values[10], values[31] = 7, 5
    words = packed.pack_bits(values, 3)
    assert words.tolist() == [3 << 30, 1, 5 << 29]


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_pairs_there_and_back(groups, outputs, data):
    """Also with fewer than two of four values."""
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    matrix = draw.standard_normal((4 * groups, outputs)).astype(np.float32)
    matrix = sparse.magnitude(matrix, sparse.read_pattern("2:4"))
    matrix[draw.random(matrix.shape) < 0.2] = 0
    places, values = packed.pack_pairs(matrix)
    assert len(values) == matrix.size // 2 and len(places) == -(-matrix.size // 8)
    found = packed.unpack_pairs(places, values, matrix.shape)
    np.testing.assert_array_equal(found, matrix)


def make_leaves():
    """Return a leaf of each form, and the forms."""
    draw = np.random.default_rng(0)
    stack = draw.standard_normal((3, 20, 2, 5)).astype(np.float32)  # [N, D, H, K]
    leaves = {
        "a/dense": draw.standard_normal((7,)).astype(np.float32),
        "a/sparse": stack * (draw.random(stack.shape) < 0.4),
        "b/pairs": stack.copy(),
        "b/scaled": stack.copy(),
        "word": draw.standard_normal((31, 12)).astype(np.float32),
    }
    forms = {"a/sparse": Form("sparse", False, 20), "b/pairs": Form("2:4", False, 20)}
    for slot in leaves["b/pairs"].reshape(3, 20, 10):
        slot[:] = sparse.magnitude(slot, sparse.read_pattern("2:4"))
    hessian = np.diag(np.linspace(0.01, 9, 20))
    scaled = leaves["b/scaled"].reshape(3, 20, 10)
    found = [quantize.awq(slot, hessian, 3, 8) for slot in scaled]
    found = [q._replace(inputs=np.linspace(0.5, 2, 20, dtype="f4")) for q in found]
    found[1] = found[1]._replace(inputs=None)  # one layer without scaling
    for slot, q in zip(scaled, found, strict=True):
        slot[:] = quantize.dequantize(q)
    table = quantize.rtn(leaves["word"].T, 8, 12)
    leaves["word"] = np.ascontiguousarray(quantize.dequantize(table).T)
    matrices = tuple(map(packed.pack_matrix, found))
    forms["b/scaled"] = Form("quantized", False, 20, matrices)
    forms["word"] = Form("quantized", True, 12, (packed.pack_matrix(table),))
    return leaves, forms


def test_the_file_gives_back_every_leaf(tmp_path):
    leaves, forms = make_leaves()
    file = tmp_path / packed.FILE
    size = packed.write_packed(file, leaves, forms, {"method": "all"})
    assert size == file.stat().st_size
    tree, recipe = packed.read_packed(tmp_path)
    assert recipe == {"method": "all"}
    found = {"word": tree["word"]}
    found |= {f"{a}/{b}": tree[a][b] for a in "ab" for b in tree[a]}
    assert found.keys() == leaves.keys()
    for name, leaf in leaves.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], leaf)


def test_the_file_is_of_safetensors_and_small(tmp_path):
    leaves, forms = make_leaves()
    packed.write_packed(tmp_path / packed.FILE, leaves, forms, {})
    tensors = load_file(tmp_path / packed.FILE)
    assert tensors["b/scaled.codes"].nbytes == 3 * 4 * -(-20 * 10 * 3 // 32)
    assert tensors["b/pairs.values"].nbytes == leaves["b/pairs"].nbytes // 2
    assert tensors["b/pairs.places"].nbytes == 3 * 20 * 10 // 8
    assert tensors["a/sparse.values"].size == np.count_nonzero(leaves["a/sparse"])


@pytest.mark.parametrize("content", [None, b"", b"no tensors at all"])
def test_other_files_are_refused_in_a_line(tmp_path, content):
    file = tmp_path / packed.FILE
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=str(file)):
        packed.read_packed(file)
