# SPDX-License-Identifier: Apache-2.0
"""Decide which token ranges make a row."""
