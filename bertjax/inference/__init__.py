# SPDX-License-Identifier: Apache-2.0
"""Inference with loaded models: filling blanks, embedding texts, predicting rows."""
