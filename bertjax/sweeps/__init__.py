# SPDX-License-Identifier: Apache-2.0
"""Train many runs of one config side by side in one program."""
