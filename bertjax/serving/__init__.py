# SPDX-License-Identifier: Apache-2.0
"""Models as files that others run: StableHLO by jax alone, ONNX by onnxruntime."""
