# SPDX-License-Identifier: Apache-2.0
"""The bits of a token: of the marks in a store, and of masking's tables.

They share their bits, so that masking takes either for where words begin.
"""

BEGINS_WORD = 1
ENTITY = 2  # part of a name that the document's record lists
BEGINS_ENTITY = 4
SPECIAL = 8  # of the tables alone: never masked, never drawn
CONCEPT = 16  # part of a word of data.concept
CONTROL = 32  # part of a word of data.control

MARKED = {"concept": CONCEPT, "control": CONTROL}  # key of config.data -> its bit
