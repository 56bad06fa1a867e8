# SPDX-License-Identifier: Apache-2.0
"""Atomic writing of files and directories."""
