# SPDX-License-Identifier: Apache-2.0
"""Every backend under every mask obeys the boolean mask or refuses the mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import UserError
from bertjax.models import attention
from bertjax.models.attention import BACKENDS, attend, choose_backend, describe_backend
from bertjax.models.attention_mask import AttentionMask
from bertjax.models.config import EncoderConfig
from bertjax.parallel.mesh import make_mesh

SHAPE = (4, 128, 2, 64)
LENGTH = SHAPE[1]
AT = np.arange(LENGTH)
# Four rows: full, half padding, padding at the beginning, a single real token.
REAL = np.stack([AT >= 0, AT < 64, AT >= 50, AT == 7]).astype(np.int32)
SEGMENTS = REAL * (1 + (AT > 30) + (AT > 100)).astype(np.int32)
STEPS = (REAL * np.random.default_rng(0).integers(-4, 5, REAL.shape)).astype(np.int32)
POSITIONS = (AT % 64 + 0 * REAL).astype(np.int32)


def make(packed=False, window=0, steps=False, causal=False, jumps=False):
    return AttentionMask(
        jnp.asarray(SEGMENTS if packed else REAL),
        packed,
        window,
        steps=jnp.asarray(STEPS) if steps else None,
        positions=jnp.asarray(POSITIONS) if jumps else None,
        causal=causal,
    )


MASKS = {
    "full": make(),
    "packed": make(packed=True),
    "window": make(window=16),
    "steps": make(steps=True),
    "steps packed": make(packed=True, steps=True),
    "steps window": make(steps=True, window=16, jumps=True),
    "causal": make(causal=True),
    "causal packed": make(packed=True, causal=True),
    "causal window": make(window=16, causal=True),
    "causal packed window": make(packed=True, window=16, causal=True),
}
# (backend, mask) -> words of the refusal. All other pairs are accepted.
REFUSED = {("fused", "steps window"): "no windows for attention_steps"}


def run(attention, *arrays):
    """Return the values, and the gradients of q, k and v."""
    y, back = jax.vjp(jax.jit(attention), *arrays[:3])
    return y, *back(arrays[3])


@pytest.fixture(autouse=True)
def cudnn_without_a_gpu(monkeypatch):
    """Replace cuDNN by XLA's result for the same arguments."""
    dot_product_attention = jax.nn.dot_product_attention

    def stand_in(q, k, v, implementation, **how):
        if how.get("is_causal"):
            assert "mask" not in how
        return dot_product_attention(q, k, v, implementation="xla", **how)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)


# Kernels take seconds to compile: the other masks run with the slow tests.
FAST = ("full", "causal packed window", "steps packed", "steps window")
SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in MASKS if n not in FAST]


@pytest.mark.parametrize("name", [*FAST, *SLOW])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_boolean_mask_says(backend, name):
    """Values and gradients at real tokens are right; those at padding are finite."""
    mask = MASKS[name]
    dtype = jnp.bfloat16 if backend == "cudnn" else jnp.float32
    if refused := REFUSED.get((backend, name)):
        with pytest.raises(UserError, match=refused) as e:
            choose_backend(backend, SHAPE, 0.0, dtype, mask.kind)
        assert "\n" not in str(e.value)
        return
    assert choose_backend(backend, SHAPE, 0.0, dtype, mask.kind) == (backend, {})
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(k, SHAPE) for k in keys]
    real = jnp.asarray(REAL)[:, :, None, None] > 0
    if backend == "cudnn" and name in ("full", "causal"):
        real = real & (AT[: SHAPE[0]] < 2)[:, None, None, None]  # padded at the end
    arrays[3] = jnp.where(real, arrays[3], 0)

    def ours(q, k, v):
        return BACKENDS[backend](q, k, v, mask, 0.0, None)

    def plain(q, k, v):
        scores = jnp.einsum("BQHK,BTHK->BHQT", q, k) / SHAPE[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(mask.boolean, scores, -1e30), axis=-1)
        return jnp.einsum("BHQT,BTHK->BQHK", weights, v)

    found, wanted = run(ours, *arrays), run(plain, *arrays)
    np.testing.assert_allclose(found[0] * real, wanted[0] * real, atol=3e-6)
    for a, b in zip(found, wanted, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a * real, b * real, atol=2e-5)


@pytest.mark.parametrize("name", ["steps packed", "causal packed"])
def test_the_fused_kernel_drops_the_same_weights_under_every_mask(name):
    """It also does on a mesh, where each device has the steps of its own rows."""
    q, k, v, dy = jax.random.normal(jax.random.key(1), (4, *SHAPE))

    def of(backend):
        def attention(q, k, v):
            return attend(q, k, v, MASKS[name], 0.3, jax.random.key(2), backend)

        return run(attention, q, k, v, dy)

    wanted = of("xla")
    for sizes in ((2, 2, 1), (1, 1, 1)):
        mesh = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)])
        with jax.set_mesh(mesh):
            for a, b in zip(of("fused"), wanted, strict=True):
                np.testing.assert_allclose(a, b, atol=2e-5)


def test_how_long_rows_the_fused_kernel_takes(monkeypatch):
    def chosen(kind, length, steps=False, rate=0.1):
        monkeypatch.setattr(attention, "device_kind", lambda: kind)
        mask = MASKS["steps" if steps else "full"].kind
        return choose_backend("tpu", (8, length, 12, 64), rate, kind=mask)[0]

    for kind in ("TPU v5 lite", "TPU v5", "TPU v6 lite"):
        assert chosen(kind, 1024) == chosen(kind, 640, steps=True) == "fused"
        assert chosen(kind, 1152) == "xla"  # splash has no dropout
    assert chosen("TPU v4", 512) == "fused"
    assert chosen("TPU v4", 640) == "xla"
    # Without dropout splash runs long rows, and skips blocks that the mask hides.
    assert chosen("TPU v5 lite", 1024, rate=0.0) == "splash"
    assert chosen("TPU v5 lite", 1024, steps=True, rate=0.0) == "fused"
    assert chosen("TPU v5 lite", 512, rate=0.0) == "fused"


def test_a_choice_says_why():
    cfg = EncoderConfig(100, 768, 12, 12, 3072, attention="tpu", dtype="bfloat16")
    said = describe_backend(cfg, [96], ["attention_steps"])
    assert said.startswith("xla (not fused: rows of 96 tokens")
    assert "\n" not in said
    said = describe_backend(cfg, [128], ["attention_edges"])
    assert said.startswith("xla (not fused: it does not support attention_edges; ")


@pytest.mark.parametrize(
    "name, window", [("causal", 0), ("causal", 200), ("steps", 0), ("steps", 200)]
)
def test_splash_leaves_out_blocks_of_long_rows(name, window):
    """The mask has 5 x 5 blocks of 128; some are hidden completely."""
    shape = (1, 640, 1, 128)
    at = np.arange(640)
    steps = at // 64 if name == "steps" else None
    mask = AttentionMask(
        jnp.asarray(at < 600, jnp.int32)[None],
        window=window,
        steps=None if steps is None else jnp.asarray(steps, jnp.int32)[None],
        causal=name == "causal",
    )
    blocks = np.asarray(mask.boolean)[0, 0].reshape(5, 128, 5, 128)
    assert not blocks.any(axis=(1, 3)).all()
    arrays = jax.random.normal(jax.random.key(3), (4, *shape))

    def of(backend):
        return run(lambda q, k, v: attend(q, k, v, mask, 0.0, None, backend), *arrays)

    for a, b in zip(of("splash"), of("xla"), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_steps_in_splash_wait_for_a_version_that_was_tried(monkeypatch):
    kind = MASKS["steps"].kind
    monkeypatch.setattr(jax, "__version__", "0.99.0")
    name, refused = choose_backend("tpu", (8, 2048, 12, 64), 0.0, kind=kind)
    assert name == "xla"
    assert refused["splash"].endswith(", not 0.99.0")
    assert (
        choose_backend("splash", SHAPE, 0.0, kind=MASKS["causal"].kind)[0] == "splash"
    )
