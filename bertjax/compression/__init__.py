# SPDX-License-Identifier: Apache-2.0
"""Post-training compression: pruning and quantization, layer by layer."""
