# SPDX-License-Identifier: Apache-2.0
"""Read and write other libraries' model files without those libraries."""
