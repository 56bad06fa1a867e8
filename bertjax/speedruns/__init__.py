# SPDX-License-Identifier: Apache-2.0
"""Speedruns: the best small encoder from a fixed text in a fixed time."""
