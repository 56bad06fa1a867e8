# SPDX-License-Identifier: Apache-2.0
"""How XLA multiplies bfloat16 on a CPU: with its own library, or with oneDNN."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bertjax.parallel.host_memory import cpu_has

# The options of XLA's CPU compiler that turn its own library off and oneDNN on. Without
# that library a maximum over an axis that keeps NaN takes a tenth of a forward pass, so
# the last option lets it skip NaN: a softmax keeps NaN in its exponentials.
ONEDNN = {
    "xla_cpu_experimental_ynn_fusion_type": "",
    "xla_cpu_experimental_onednn_custom_call": True,
    "xla_cpu_enable_fast_min_max": True,
}


@functools.cache
def onednn_options() -> dict[str, Any]:
    """Return compiler options for forward passes whose products all end in bfloat16.

    With AMX, oneDNN multiplies twice as fast as XLA's own library if the result is
    bfloat16 too, but it multiplies in f32 if the result is f32, as the logits of a
    vocabulary and the gradients of parameters are. Returns {} elsewhere: on other
    devices, without AMX, for versions of XLA that do not know the options or ignore
    them, and with a cache of compiled programs (JAX_COMPILATION_CACHE_DIR), which
    cannot store a program that calls oneDNN.
    """
    if jax.config.jax_compilation_cache_dir:
        return {}
    if jax.default_backend() != "cpu" or not cpu_has("amx_bf16"):
        return {}
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    try:
        product = jax.jit(jnp.matmul, compiler_options=ONEDNN).lower(x, x).compile()
    except jax.errors.JaxRuntimeError:  # there is no such option
        return {}
    return ONEDNN if "__onednn$matmul" in product.as_text() else {}
