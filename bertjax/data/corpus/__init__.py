# SPDX-License-Identifier: Apache-2.0
"""Read files into documents and sentences."""
