# SPDX-License-Identifier: Apache-2.0
"""The bits that describe a token, in a store's marks and in masking's tables.

Both use the same bits, so that masking can read either to find where words begin.
"""

BEGINS_WORD = 1
ENTITY = 2  # part of a name that the document's record lists
BEGINS_ENTITY = 4
SPECIAL = 8  # only in the tables: never masked, never drawn
CONCEPT = 16  # part of a word of data.concept
CONTROL = 32  # part of a word of data.control

MARKED = {"concept": CONCEPT, "control": CONTROL}  # key of config.data -> its bit
