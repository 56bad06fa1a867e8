# SPDX-License-Identifier: Apache-2.0
"""Other libraries' files of models, read and written without those libraries."""
