# SPDX-License-Identifier: Apache-2.0
"""What a model is worth: losses, likelihoods of lines, retrieval, a task's metrics.

Every module here but SUPPORT is a scorer that `bertjax.evaluate --what` can name
(scorer.py says what one is).
"""

SUPPORT = ("confidence", "lines", "mlm_loss", "own", "scorer")
