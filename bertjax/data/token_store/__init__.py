# SPDX-License-Identifier: Apache-2.0
"""Token stores, and how they are created from text."""
