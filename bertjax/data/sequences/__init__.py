# SPDX-License-Identifier: Apache-2.0
"""Which token ranges make a row."""
