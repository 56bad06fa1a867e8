# SPDX-License-Identifier: Apache-2.0
"""XLM-RoBERTa, whose code is RoBERTa's."""

import dataclasses

from bertjax.interop.families import roberta

FAMILY = dataclasses.replace(
    roberta.FAMILY, model_type="xlm-roberta", class_prefix="XLMRoberta"
)
