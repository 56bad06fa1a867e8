# SPDX-License-Identifier: Apache-2.0
"""From files to documents and sentences."""
