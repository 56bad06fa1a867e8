# SPDX-License-Identifier: Apache-2.0
"""Every module here but these is an objective that a config can name."""

SUPPORT = ("base", "losses", "metrics")
