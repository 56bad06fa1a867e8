# SPDX-License-Identifier: Apache-2.0
"""Attention: one function, `attend`, and the backends that compute it."""

import functools
import importlib
from collections.abc import Callable, Container, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bertjax import UserError, counted, registry
from bertjax.models.attention_mask import FULL, AttentionMask, MaskKind, mask_kind
from bertjax.models.config import EncoderConfig
from bertjax.models.layers import Rng, dropout, store_rows
from bertjax.parallel.sharding import index_along, per_device, size_along

# A backend computes `attend` from (q, k, v, mask, rate, rng). `make_attention` of a
# module from outside the package returns one. With rate 0 there is no dropout; in
# evaluations rng is None then.
Backend = Callable[..., jax.Array]
# "tpu" and "gpu" choose the first of these backends that supports the shapes.
PREFERENCES = {"tpu": ("fused", "splash", "xla"), "gpu": ("cudnn", "xla")}
TPU_KERNELS = ("fused", "splash")
# In rows longer than SHORT tokens splash skips the blocks that a mask without steps
# hides, so it is preferred there.
SHORT, PREFERRED_BEYOND = 512, {"tpu": ("splash", "fused", "xla")}
# Versions of jax with which splash attention was tested on masks that are computed
# while the program runs.
DYNAMIC_SPLASH = ("0.10.2", "0.12.0.1")


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: AttentionMask,
    rate: float,
    rng: Rng,
    backend: str = "xla",
) -> jax.Array:
    """Compute scaled dot-product attention (Vaswani et al. 2017, equation 1).

    k, v: [B, L, H, K]; q, result: the same, or [B, P, H, K] with mask.query_positions,
    which only "xla" supports. Weights are dropped at `rate` if there is an rng.
    backend: see EncoderConfig.attention. The softmax is in f32 whatever the dtype of q.
    Raises UserError if the backend that the config names does not support the shapes,
    ValueError for mask.query_positions with a backend other than "xla".
    """
    rate = 0.0 if rng is None else rate
    name, _ = choose_backend(backend, k.shape, rate, q.dtype, mask.kind)
    if mask.query_positions is not None and name != "xla":
        raise ValueError(f"attention={name} takes a query for each key, and no others")
    run = BACKENDS.get(name) or _outside_backend(name)
    with jax.named_scope(f"attention_{name.partition(':')[0]}"):
        return run(q, k, v, mask, rate, rng)


def choose_backend(
    backend: str,
    shape: tuple[int, int, int, int],
    rate: float,
    dtype: jnp.dtype = jnp.bfloat16,
    kind: MaskKind = FULL,
) -> tuple[str, dict[str, str]]:
    """Return the backend for q, k, v of shape [B, L, H, K] under such a mask.

    Also returns, by name, why the backends preferred to it do not support these
    arguments. Raises UserError if no backend that `backend` stands for does.
    """
    refused: dict[str, str] = {}
    names = PREFERENCES.get(backend, (backend,))
    if shape[1] > SHORT and not kind.steps:
        names = PREFERRED_BEYOND.get(backend, names)
    for name in names:
        reason = _refuse(name, shape, rate, dtype, kind)
        if not reason:
            return name, refused
        refused[name] = reason
    raise UserError(f"model.attention={backend}: {reason}")


def _refuse(
    name: str,
    shape: tuple[int, int, int, int],
    rate: float,
    dtype: jnp.dtype,
    kind: MaskKind,
) -> str:
    """Return why a backend does not support these arguments; "" if it does."""
    _, length, heads, width = shape
    if name != "xla" and kind.bias:
        return "it has no position bias: model.relative_attention_num_buckets"
    if name != "xla" and kind.edges:
        return "it does not support attention_edges"
    if name == "fused":
        return _refuse_fused(length, heads, width, kind)
    if name in ("splash", "cudnn") and rate:
        return f"it has no dropout: model.attention_probs_dropout_prob={rate}"
    if name == "splash" and length % 128:
        return f"{length} tokens are not a multiple of 128"
    if name == "splash" and kind.steps and jax.__version__ not in DYNAMIC_SPLASH:
        tried = " and ".join(DYNAMIC_SPLASH)
        return f"attention_steps were tried with jax {tried}, not {jax.__version__}"
    if name == "cudnn" and dtype == jnp.float32:
        return "it does not support float32"
    if name == "cudnn" and (width % 8 or width > 128):
        return f"heads are {width} wide, not a multiple of 8 up to 128"
    return ""


def _refuse_fused(length: int, heads: int, width: int, kind: MaskKind) -> str:
    from bertjax.models import fused_attention as fused

    if kind.steps and kind.window:
        return "it has no windows for attention_steps"
    split, device = size_along("heads"), device_kind()
    if heads % split == 0 and fused.fits(length, heads // split, width, device):
        return ""
    return (
        f"rows of {length} tokens and {counted(heads, 'head')} of {width} on "
        f"{counted(split, 'device')}: "
        f"it takes up to {fused.longest(device)} tokens, a multiple of {fused.LANES}, "
        f"and heads that fill {fused.LANES} lanes"
    )


def describe_backend(
    cfg: EncoderConfig, lengths: Iterable[int], arrays: Container[str] = ()
) -> str:
    """Describe in one line the backend for rows of these lengths, and why it is chosen.

    Call it under the run's mesh. arrays: the names of the arrays in the run's batches.
    Raises UserError as `attend` does.

    >>> describe_backend(cfg, [128])  # on a GPU
    'xla (not cudnn: it has no dropout: model.attention_probs_dropout_prob=0.1)'
    """
    chosen: dict[str, list[str]] = {}
    for length in sorted({*lengths}):
        shape = (1, length, cfg.num_attention_heads, cfg.head_dim)
        rate, dtype = cfg.attention_probs_dropout_prob, jnp.dtype(cfg.dtype)
        kind = mask_kind(cfg, *(f"attention_{x}" in arrays for x in ("steps", "edges")))
        name, refused = choose_backend(cfg.attention, shape, rate, dtype, kind)
        why = "; ".join(f"not {other}: {reason}" for other, reason in refused.items())
        chosen.setdefault(name + f" ({why})" * bool(why), []).append(str(length))
    if len(chosen) == 1:
        return next(iter(chosen))
    return ", ".join(f"{' '.join(at)} tokens: {name}" for name, at in chosen.items())


def import_backend(backend: str) -> None:
    """Import a backend's modules; importing while jax traces would trace twice.

    Raises UserError if a module from outside the package, or its make_attention, is
    missing.
    """
    if registry.is_outside(backend):
        _outside_backend(backend)
    if backend in ("tpu", "fused"):
        importlib.import_module("bertjax.models.fused_attention")
    if backend in ("tpu", "splash"):
        importlib.import_module("jax.experimental.pallas.ops.tpu.splash_attention")


@functools.cache
def _outside_backend(backend: str) -> Backend:
    key, maker = "model.attention", "make_attention"
    module, options = registry.load_outside(key, backend, maker)
    return registry.make(key, module, maker, options)


def _xla(q, k, v, mask, rate, rng):
    """Compute attention in plain jax, with the scores in memory.

    The result is divided by the weights' sum, because it is smaller than the scores.
    This is the same, as dropout and the product with v are linear.
    """
    with jax.named_scope("scores"):
        q = q * (q.shape[-1] ** -0.5)
        scores = _scores(q, k).astype(jnp.float32)
        if mask.bias is not None:
            scores = scores + mask.bias_of_queries
        scores = jnp.where(mask.boolean, scores, jnp.finfo(jnp.float32).min)
        peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - peak)
        total = jnp.sum(weights, axis=-1).swapaxes(1, 2)[..., None]  # [B, L, H, 1]
    with jax.named_scope("context"):
        weights = dropout(weights.astype(q.dtype), rate, rng, mask.rows(q.shape[2]))
        y = jnp.einsum("BHQT,BTHK->BQHK", weights, v)
        return (y / total).astype(q.dtype)


@jax.custom_vjp
def _scores(q, k):
    """Return q . k, [B, H, Q, T], from [B, Q, H, K] and [B, T, H, K], in their dtype.

    The gradient of k is a product that is fast in bfloat16 on a CPU (`store_rows`).
    """
    return jnp.einsum("BQHK,BTHK->BHQT", q, k)


def _scores_backward(saved, dy):
    q, k = saved
    dq = jnp.einsum("BHQT,BTHK->BQHK", dy, k)
    if q.dtype != jnp.bfloat16:
        return dq, jnp.einsum("BHQT,BQHK->BTHK", dy, q)
    return dq, jnp.einsum("BHTQ,BQHK->BTHK", store_rows(dy.swapaxes(2, 3)), q)


_scores.defvjp(lambda q, k: (_scores(q, k), (q, k)), _scores_backward)


def _fused(q, k, v, mask, rate, rng):
    """Run our own TPU kernel (fused_attention.py) on each device's rows and heads.

    On a CPU the kernel is interpreted, which is slow and meant for tests.
    """
    from bertjax.models.fused_attention import fused_attention

    b, length, heads, width = q.shape
    key = np.zeros(2, np.uint32) if rng is None else jax.random.key_data(rng)

    def local(q, k, v, keys, steps, key):
        rows, here = q.shape[0], q.shape[2] // width
        at = [index_along("batch") * rows, index_along("heads") * here, heads]
        seeds = jnp.concatenate([key, jnp.stack([jnp.uint32(i) for i in at])])
        return fused_attention(
            q, k, v, keys, keys if mask.compares_sequences else None, steps, seeds,
            here, rate, mask.window, mask.causal, is_interpreted(),
        )  # fmt: skip

    wide, row = "batch length heads", "batch length"
    flat = [x.reshape(b, length, heads * width) for x in (q, k, v)]
    run = per_device(local, [wide, wide, wide, row, row, "key"], wide)
    key = jnp.asarray(key).reshape(-1)[-2:]
    return run(*flat, mask.keys, mask.steps, key).reshape(q.shape)


def _splash(q, k, v, mask, rate, rng):
    """Run jax's splash attention, for long rows on TPU.

    It skips the blocks outside the window and those after a causal query. With steps it
    skips the blocks that the row's own mask hides. Padding attends to padding, in
    unpacked rows too.
    """
    run_rows = _splash_static if mask.steps is None else _splash_dynamic
    wide, row = "batch length heads head", "batch length"

    def local(q, k, v, keys, steps, positions):
        q, k, v = (x.swapaxes(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
        seen = mask._replace(keys=keys, steps=steps, positions=positions)
        return run_rows(q, k, v, seen).swapaxes(1, 2).astype(q.dtype)

    run = per_device(local, [wide, wide, wide, row, row, row], wide)
    return run(q, k, v, mask.keys, mask.steps, mask.positions)


def _splash_kernel(mask: Any, length: int) -> Any:
    """Build jax's splash kernel for one of its mask types, or boolean [heads, L, L]."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    block = max(n for n in (512, 384, 256, 128) if length % n == 0)
    parts = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
    blocks = splash.BlockSizes(
        **{f"block_{part}": block for part in parts}, use_fused_bwd_kernel=True
    )
    return splash.make_splash_mha(
        mask,
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=1,
        # stacked_layers.remat saves values of this name for the backward pass.
        residual_checkpoint_name="product",
        interpret=is_interpreted(),
    )


def _splash_static(q, k, v, mask):
    """Run splash on q, k, v [B, H, L, K] with a mask that is known at trace time."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape, near = (q.shape[2], q.shape[2]), mask.window // 2
    if mask.window:
        one = splash.LocalMask(shape, (near, 0 if mask.causal else near), 0)
    else:
        one = splash.CausalMask(shape) if mask.causal else splash.FullMask(shape)
    kernel = _splash_kernel(splash.MultiHeadMask([one] * q.shape[1]), q.shape[2])
    return jax.vmap(kernel)(q, k, v, splash.SegmentIds(mask.keys, mask.keys))


def _splash_dynamic(q, k, v, mask):
    """Run splash on q, k, v [B, H, L, K] row by row, with boolean masks [L, L]."""

    def of_a_row(inputs):
        q, k, v, *of_mask = inputs
        keys, steps, positions = (None if x is None else x[None] for x in of_mask)
        seen = mask._replace(keys=keys, steps=steps, positions=positions).boolean[0]
        kernel = _splash_kernel(seen, q.shape[1])
        # make_splash_mha turns this flag into a traced array, but the kernel branches
        # on it in Python, so set it to a Python bool again.
        for name in ("fwd_mask_info", "dkv_mask_info"):
            info = getattr(kernel, name)._replace(is_dynamic_mask=True)
            setattr(kernel, name, info)
        # The kernel is for one head: all heads share the mask, so it is stored once.
        return jax.vmap(kernel)(*(x[:, None] for x in (q, k, v)))[:, 0]

    return jax.lax.map(of_a_row, (q, k, v, mask.keys, mask.steps, mask.positions))


def _cudnn(q, k, v, mask, rate, rng):
    """Run cuDNN's flash attention on NVIDIA GPUs.

    It skips padding, which must come after the real tokens. Packed rows, steps and
    windows need a full mask; cuDNN itself supports only causal windows.
    """

    def local(q, k, v, keys, steps, positions):
        seen = mask._replace(keys=keys, steps=steps, positions=positions)
        if mask.packed or mask.window or steps is not None:
            shape = (len(q), 1, q.shape[1], q.shape[1])
            how = {"mask": jnp.broadcast_to(seen.boolean, shape)}
        else:
            real = jnp.maximum(jnp.sum(keys > 0, axis=1), 1).astype(jnp.int32)
            how = {"key_value_seq_lengths": real}
            how |= {"is_causal": True} if mask.causal else {}
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **how)

    wide, row = "batch length heads head", "batch length"
    run = per_device(local, [wide, wide, wide, row, row, row], wide)
    return run(q, k, v, mask.keys, mask.steps, mask.positions)


BACKENDS: dict[str, Backend] = dict(
    xla=_xla, fused=_fused, splash=_splash, cudnn=_cudnn
)


def is_interpreted() -> bool:
    """Return True if TPU kernels are interpreted because the devices are no TPUs."""
    return "tpu" not in (device_kind() or jax.default_backend()).lower()


def device_kind() -> str:
    """Return the mesh's device kind, such as "TPU v5 lite"; "" without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return "" if mesh.empty else getattr(mesh.abstract_device, "device_kind", "")
