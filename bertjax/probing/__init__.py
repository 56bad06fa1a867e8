# SPDX-License-Identifier: Apache-2.0
"""Probing of frozen encoders: features per layer, probes, description lengths."""
