# SPDX-License-Identifier: Apache-2.0
"""Classification of a text or a pair of texts (all of GLUE's tasks but STS-B)."""

from bertjax.tasks import metrics, tables, text_rows
from bertjax.tasks.task_type import TaskType, class_option

TASK_TYPE = TaskType(
    parse_lines=tables.parse_lines,
    find_labels=text_rows.find_labels,
    make_rows=text_rows.make_texts,
    metrics=(*metrics.OF_CLASSES,),
    default_metrics=("accuracy",),
    outputs=("scores",),
    unused={"choices": ""},
    head_options=class_option,
    hf_class="ForSequenceClassification",
)
