# SPDX-License-Identifier: Apache-2.0
"""Measure what bertjax.benchmark and bertjax.preflight report."""
