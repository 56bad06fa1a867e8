# SPDX-License-Identifier: Apache-2.0
"""CamemBERT, whose code is RoBERTa's."""

import dataclasses

from bertjax.interop.families import roberta

FAMILY = dataclasses.replace(
    roberta.FAMILY, model_type="camembert", class_prefix="Camembert"
)
