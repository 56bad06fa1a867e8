# SPDX-License-Identifier: Apache-2.0
"""Write compression_golden.npz: three layers compressed by the official SparseGPT and
GPTQ. Needs torch and transformers, which the tests do not, and checkouts of both.

    git clone https://github.com/IST-DASLab/sparsegpt; git clone .../IST-DASLab/gptq
    python tests/testdata/make_compression_golden.py sparsegpt gptq

Where bertjax differs on purpose, they are adapted. SparseGPT removes one weight more
than its sparsity's index says, so it gets the sparsity whose index is the last weight
to remove. GPTQ's scales are rounded to float16, as bertjax stores them, and its blocks
are the groups, so that each grid is fitted to updated weights. No token is padding.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

LAYERS = {"blocks": (160, 12), "dead": (96, 16), "wide": (264, 8)}  # in, out
GROUP = 32
BLOCK = 128


def official(folder: str, name: str) -> ModuleType:
    """Import a module of a checkout; both checkouts have a quant.py."""
    for module in ("quant", name):
        sys.modules.pop(module, None)
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def make_layer(seed: int, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw correlated inputs i8 [tokens, in] and weights f32 [out, in]."""
    draw = np.random.default_rng(seed)
    mix = draw.standard_normal((inputs, inputs)) / np.sqrt(inputs)
    mix *= np.exp(0.5 * draw.standard_normal(inputs))
    x = draw.standard_normal((inputs + 40, inputs)) @ mix
    x = np.clip(np.round(12 * x), -127, 127).astype(np.int8)
    weights = (0.05 * draw.standard_normal((outputs, inputs))).astype(np.float32)
    return x, weights


def run(make, x: np.ndarray, weights: np.ndarray, work) -> np.ndarray:
    """Return a layer's weights [in, out] after compression by an official class."""
    layer = torch.nn.Linear(weights.shape[1], weights.shape[0], bias=False)
    layer.weight.data = torch.from_numpy(weights.copy())
    one = make(layer)
    one.add_batch(torch.from_numpy(x.astype(np.float32)), None)
    work(one)
    return layer.weight.data.numpy().T.copy()


def main(sparsegpt_folder: str, gptq_folder: str) -> None:
    torch.cuda.synchronize = lambda: None
    arrays = {}
    layers = {}
    for seed, (name, sizes) in enumerate(LAYERS.items()):
        x, weights = make_layer(seed, *sizes)
        if name == "dead":
            x[:, [3, 40]] = 0
        layers[name] = x, weights
        arrays |= {f"{name}/x": x, f"{name}/weights": weights.T.copy()}

    pruner = official(sparsegpt_folder, "sparsegpt").SparseGPT
    for name, (x, weights) in layers.items():

        def half(one, weights=weights):
            # With this share both full and short blocks get the index before the half.
            count = len(weights) * BLOCK
            one.fasterprune((count // 2 - 1 + 0.5) / count, blocksize=BLOCK)

        arrays[f"{name}/half"] = run(pruner, x, weights, half)
        arrays[f"{name}/pairs"] = run(
            pruner, x, weights, lambda one: one.fasterprune(0, 2, 4)
        )

    module = official(gptq_folder, "gptq")

    class HalfQuantizer(module.Quantizer):
        def find_params(self, x, weight=False):
            super().find_params(x, weight)
            self.scale = self.scale.half().float()
            low = torch.clamp(x.min(1)[0], max=0)[:, None]
            self.zero = torch.clamp(torch.round(-low / self.scale), 0, self.maxq)

    for name, (x, weights) in layers.items():
        for bits in (4, 3):

            def work(one, bits=bits):
                one.quantizer = HalfQuantizer()
                one.quantizer.configure(bits, perchannel=True, sym=False)
                one.fasterquant(blocksize=GROUP, groupsize=GROUP)

            arrays[f"{name}/bits{bits}"] = run(module.GPTQ, x, weights, work)
    np.savez_compressed(Path(__file__).with_name("compression_golden.npz"), **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
