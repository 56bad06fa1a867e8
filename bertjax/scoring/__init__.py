# SPDX-License-Identifier: Apache-2.0
"""Score models: losses, likelihoods of lines, retrieval, a task's metrics.

Every module here except those in SUPPORT is a scorer for `bertjax.evaluate --what`
(scorer.py defines what a scorer is).
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
