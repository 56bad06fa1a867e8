# SPDX-License-Identifier: Apache-2.0
"""Regression of a text or a pair, such as how similar two sentences are (STS-B)."""

from bertjax.tasks import metrics, tables, text_rows
from bertjax.tasks.task_type import TaskType

TASK_TYPE = TaskType(
    parse_lines=tables.parse_lines,
    make_rows=text_rows.make_texts,
    metrics=(*metrics.OF_NUMBERS,),
    outputs=("scores",),
    unused={"labels": "", "choices": ""},
    hf_class="ForSequenceClassification",
)
