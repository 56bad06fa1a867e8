# SPDX-License-Identifier: Apache-2.0
"""Finetuning tasks: their types, their rows and their metrics."""
