# SPDX-License-Identifier: Apache-2.0
"""Builds the parts of a run from its config: batches, train step, models."""
