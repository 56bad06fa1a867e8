# SPDX-License-Identifier: Apache-2.0
"""A task type from outside the package: texts, each with one of several ordered levels.

Its columns are `remark` and `level` unless task.* names others, its head is
lab.ordinal, and its metric is by how many levels an answer is off on average.
"""

from dataclasses import dataclass

import numpy as np

from bertjax import UserError
from bertjax.tasks import tables, text_rows
from bertjax.tasks.task_type import TaskType


@dataclass(frozen=True, eq=False)
class Levels(text_rows.Texts):
    """Rows whose batches have `above`, f32 [B, levels - 1]: is it above level k?"""

    def gather(self, example, keys, specials):
        batch = super().gather(example, keys, specials)
        steps = np.arange(len(self.form.labels) - 1)
        batch["above"] = (batch.pop("labels")[:, None] > steps).astype(np.float32)
        return batch

    def describe(self, row, example, tokenizer):
        yield from super().describe(
            {**row, "labels": int(row["above"].sum())}, 0, tokenizer
        )

    def score(self, outputs, example):
        levels = (np.asarray(outputs["above"]) > 0.5).sum(axis=-1)
        return {"levels_off": float(np.abs(levels - self.labels[example]).mean())}

    def answers(self, outputs, read):
        for above in outputs["above"]:
            level = int((above > 0.5).sum())
            yield {"level": self.form.labels[level], "above": above.tolist()}


def make_rows(rows, form, tokenizer, labelled, say=print):
    made = text_rows.make_texts(rows, form, tokenizer, labelled, say)
    return Levels(made.form, made.counts, made.texts, labels=made.labels)


def check(config):
    if not config.task.labels:
        raise UserError("task.labels is empty: name the levels in their order")


TASK_TYPE = TaskType(
    read=tables.read_rows,
    parse=tables.parse_text,
    make_rows=make_rows,
    metrics=("levels_off",),
    default_metrics=("levels_off",),
    outputs=("above",),
    columns={"text": "remark", "label": "level"},
    unused={"text_pair": "", "choices": ""},
    check=check,
    text_columns=1,
    head_options=lambda task, labels: {"levels": len(labels)},
)
