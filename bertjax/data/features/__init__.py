# SPDX-License-Identifier: Apache-2.0
"""Modules with `make_features` are host halves; objectives name them in `needs`."""
