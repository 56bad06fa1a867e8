# SPDX-License-Identifier: Apache-2.0
"""Open models at work on texts: blanks filled, vectors made, rows answered."""
