# SPDX-License-Identifier: Apache-2.0
"""Train the best small encoder from a fixed text in a fixed time."""
