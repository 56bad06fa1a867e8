# SPDX-License-Identifier: Apache-2.0
"""Choosing and corrupting the tokens to predict."""
