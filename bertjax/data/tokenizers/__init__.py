# SPDX-License-Identifier: Apache-2.0
"""From text to ids: tokenizers and vocabularies."""
