# SPDX-License-Identifier: Apache-2.0
"""Text generation: from left to right, or by filling blanks in any order."""
