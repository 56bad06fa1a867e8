# SPDX-License-Identifier: Apache-2.0
"""Export models for serving: StableHLO for jax alone, ONNX for onnxruntime."""
