# SPDX-License-Identifier: Apache-2.0
"""Files and directories on a disk: written whole or not at all."""
