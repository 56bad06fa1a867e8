# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and vocabularies: from text to ids."""
