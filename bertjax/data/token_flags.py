# SPDX-License-Identifier: Apache-2.0
"""The bits of a token: of the marks in a store, and of masking's tables.

They share their bits, so that masking takes either for where words begin.
"""

BEGINS_WORD = 1
ENTITY = 2  # part of a name that the document's record lists
BEGINS_ENTITY = 4
SPECIAL = 8  # of the tables alone: never masked, never drawn
