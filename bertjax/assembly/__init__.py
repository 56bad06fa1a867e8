# SPDX-License-Identifier: Apache-2.0
"""From a config to the parts of a run: batches, train step, models."""
