# SPDX-License-Identifier: Apache-2.0
"""Models made small after training: pruned or quantised layer by layer."""
