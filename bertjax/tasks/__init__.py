# SPDX-License-Identifier: Apache-2.0
"""What a model is finetuned on and how it is scored: task types, rows, metrics."""
