# SPDX-License-Identifier: Apache-2.0
"""A GPU computes what a CPU does. Skipped unless BERTJAX_TESTS_ON_GPU is set:

BERTJAX_TESTS_ON_GPU=1 python -m pytest tests/test_on_gpu.py
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, train_losses
from jax.flatten_util import ravel_pytree

from bertjax.assembly import command_line
from bertjax.measuring.measurements import make_objective
from bertjax.measuring.synthetic_data import (
    Shape,
    expected_vocab_size,
    one_phase,
    synthetic_batch,
    with_row_sizes,
)
from bertjax.models.attention import attend
from bertjax.models.attention_mask import AttentionMask
from bertjax.parallel.mesh import make_mesh
from bertjax.training.step import make_gradients

pytestmark = pytest.mark.skipif(
    not os.environ.get("BERTJAX_TESTS_ON_GPU"), reason="BERTJAX_TESTS_ON_GPU is not set"
)


def mesh_on(platform: str) -> Any:
    return make_mesh(devices=jax.devices(platform)[:1])


# ---------------------------------------------------------------- attention
LENGTH = 256
AT = np.arange(LENGTH)
REAL = np.stack([AT < LENGTH, AT < 190]).astype(np.int32)
PACKED = np.stack([1 + (AT > 50) + (AT > 200), REAL[1] * (1 + (AT > 9))])
STEPS = np.random.default_rng(0).integers(-3, 4, REAL.shape).astype(np.int32)
MASKS = {
    "padded": dict(keys=REAL),
    "packed": dict(keys=PACKED, packed=True),
    "causal": dict(keys=REAL, causal=True),
    "packed, causal": dict(keys=PACKED, packed=True, causal=True),
    "window": dict(keys=REAL, window=32),
    "steps": dict(keys=REAL, steps=STEPS * REAL),
}


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kind", MASKS)
def test_cudnn_attends_as_the_compiler_does(kind, width):
    """cuDNN's values and gradients in bfloat16 are as near to f32 as XLA's."""
    how = {n: jnp.asarray(x, jnp.int32) if n in ("keys", "steps") else x
           for n, x in MASKS[kind].items()}  # fmt: skip
    shape = (2, LENGTH, 4, width)
    q, k, v, dy = (
        jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 4)
    )
    real = jnp.asarray(REAL)[:, :, None, None]

    def run(backend: str, dtype: Any) -> list[np.ndarray]:
        def loss(*qkv):
            y = attend(*qkv, AttentionMask(**how), 0.0, None, backend)
            return jnp.sum(jnp.where(real > 0, y * dy.astype(y.dtype), 0)), y

        qkv = [x.astype(dtype) for x in (q, k, v)]
        with jax.set_mesh(mesh_on("cuda")), jax.default_matmul_precision("highest"):
            grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
            grads, y = grad(*qkv)
        return [np.asarray(x * real, np.float64) for x in (y, *grads)]

    exact = run("xla", jnp.float32)
    near, found = run("xla", jnp.bfloat16), run("cudnn", jnp.bfloat16)
    for e, n, f in zip(exact, near, found, strict=True):
        size = np.linalg.norm(e)
        assert np.linalg.norm(f - e) / size < 0.01
        assert np.linalg.norm(f - e) < 2 * np.linalg.norm(n - e) + 1e-3 * size


# ---------------------------------------------------------------- losses
RECIPES = {
    "bert": ["--config=bert.py:smoke"],
    "roberta": ["--config=roberta.py:smoke"],
    "albert": ["--config=albert.py:smoke"],
    "electra": ["--config=electra.py:smoke"],
    "modern": ["--config=modern.py:smoke"],
    "modernbert": ["--config=bert.py:smoke", "--config.model.family=modernbert"],
    "hybrid": ["--config=hybrid.py:smoke"],
    "gpt": ["--config=gpt.py:smoke"],
    "unilmv2": ["--config=unilmv2.py:smoke"],
    "diffusion": ["--config=diffusion.py:smoke"],
    "t5": ["--config=t5.py:smoke"],
    "bart": ["--config=bart.py:smoke"],
    "retromae": ["--config=retromae.py:smoke"],
}
STILL = [
    f"--config.model.{name}_dropout_prob=0" for name in ("hidden", "attention_probs")
]


def gradient(platform: str, argv: Sequence[str], dtype: str) -> np.ndarray:
    """Return losses and gradient of a recipe, flattened, computed on a platform.

    Parameters and batch do not depend on the platform or dtype.
    """
    config = command_line.parse([*argv, *STILL, f"--config.dtype={dtype}"]).config
    config = with_row_sizes(one_phase(config))
    vocab_size = expected_vocab_size(config)
    objective, _ = make_objective(config, vocab_size, "gpu")
    shape = Shape(max(8, objective.group), config.data.length, (config.data.mask_rate,))
    batch = synthetic_batch(config, objective, shape, vocab_size)
    with jax.default_device(jax.devices("cpu")[0]):
        params = objective.init(jax.random.key(1))
    params, batch = jax.device_put((params, batch), jax.devices(platform)[0])

    @jax.jit
    def run(params, batch):
        weights = objective.weights(batch)
        grad = make_gradients(objective.sums, objective.coefficients)
        grads, sums = grad(params, batch, weights, jax.random.key(2))
        losses = [sums[name][0] / weight for name, weight in weights.items()]
        return losses, grads

    with jax.set_mesh(mesh_on(platform)), jax.default_matmul_precision("highest"):
        return np.asarray(ravel_pytree(run(params, batch))[0], np.float64)


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_and_gradients_are_those_of_a_cpu(recipe):
    argv = RECIPES[recipe]
    wanted = gradient("cpu", [*argv, "--config.model.attention=xla"], "float32")
    found = gradient("cuda", argv, "float32")
    assert np.linalg.norm(found - wanted) < 1e-4 * np.linalg.norm(wanted)
    rough = gradient("cuda", argv, "bfloat16")
    assert np.linalg.norm(rough - wanted) < 0.1 * np.linalg.norm(wanted)


# ---------------------------------------------------------------- a run
def train(workdir: Path, corpus: Path, vocabulary: Path) -> dict[int, float]:
    """Train up to step 30, resuming if possible; return {step: loss}."""
    argv = [
        "--config=bert.py:smoke",
        f"--config.data.train={corpus / 'train.txt'}",
        f"--config.data.vocab={vocabulary}",
        f"--config.data.cache={workdir.parent / 'stores'}",
        "--config.data.engine=python",
        "--config.dtype=bfloat16",
        "--config.deterministic=True",
        "--config.total.steps=30",
        "--config.log.every.steps=1",
        "--config.checkpoint.every.steps=10",
        f"--workdir={workdir}",
    ]
    command = [sys.executable, "-m", "bertjax.train", *argv]
    subprocess.run(command, check=True, cwd=ROOT)
    return dict(enumerate(train_losses(workdir), 1))


def test_a_resumed_run_equals_one_without_a_break(corpus, vocabulary, tmp_path):
    """A run resumed after step 10 has the losses of an uninterrupted one."""
    whole = train(tmp_path / "run", corpus, vocabulary)
    for folder in (tmp_path / "run/checkpoints").iterdir():
        if folder.name in ("20", "30"):
            shutil.rmtree(folder)
    assert train(tmp_path / "run", corpus, vocabulary) == whole
    assert len(whole) == 30 and whole[30] < whole[1]
