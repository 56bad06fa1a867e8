# SPDX-License-Identifier: Apache-2.0
"""Text out of models: from left to right, or by filling blanks in any order."""
