# SPDX-License-Identifier: Apache-2.0
"""Rows on their way through a model: values that are computed once stay cached."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from region_data import TOKENIZER, make_config

from bertjax.inference import predict_rows
from bertjax.tasks.prepare_task import make_form
from bertjax.tasks.task_rows import Rows


@dataclass(frozen=True, eq=False)
class Costly(Rows):
    """Rows that go through all rows before they make a batch, as rerank's do."""

    made: list[int] = field(default_factory=list)

    @cached_property
    def sizes(self):
        sizes = np.arange(3, 63)
        return sizes, np.zeros_like(sizes)

    @cached_property
    def whole(self):
        self.made.append(self.length)
        return np.arange(self.n, dtype=np.int32)

    def gather(self, example, keys, specials):
        ids = np.zeros((len(example), self.length), np.int32)
        ids[:, 0] = self.whole[example]
        return {"input_ids": ids}


def test_what_is_of_all_rows_is_not_made_anew_for_each_batch():
    config = make_config()
    form = make_form(config)
    rows = Costly(form, np.zeros(5, np.int64), length=64)
    model = predict_rows.Finetuned(config, "", form, TOKENIZER, {})
    seen = predict_rows.predict(
        model, rows, 2, lambda batch: {"first": batch["input_ids"][:, 0]}
    )
    assert [int(x) for x in seen["first"]] == [*range(60)]
    assert sorted(rows.made) == sorted({*rows.made})  # 30 batches, a few lengths
    assert len(rows.made) <= 5
