# SPDX-License-Identifier: Apache-2.0
"""What a model is worth: losses, likelihoods of lines, retrieval, a task's metrics.

Every module here but SUPPORT is a scorer that `bertjax.evaluate --what` can name
(scorer.py says what one is).
"""

SUPPORT = (
    "confidence",
    "document_costs",
    "lines",
    "masked_bound",
    "mlm_loss",
    "own",
    "pseudo_likelihoods",
    "rewritten",
    "scorer",
    "sequence_scorers",
    "token_rows",
)
