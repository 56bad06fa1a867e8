# SPDX-License-Identifier: Apache-2.0
"""Scoring of query-passage pairs by a finetuned cross-encoder."""

from collections.abc import Sequence

import numpy as np

from bertjax import UserError
from bertjax.assembly import models
from bertjax.inference import predict_rows
from bertjax.tasks import hf_task_config
from bertjax.tasks.task_rows import Ragged
from bertjax.tasks.text_rows import Texts

__all__ = ["CrossEncoder", "rerank"]

OBJECTIVES = ("rerank", "regress")  # their models return a number for two texts
PAIR = ("query", "passage")
COLUMN = f"{hf_task_config.PREFIX}text"  # a key of config.json in our exports


class CrossEncoder:
    """A loaded cross-encoder. Raises UserError for any other model."""

    def __init__(self, path: str, flag: str, dtype: str = "float32") -> None:
        opened = models.open_model(path, flag)
        # A config.json that we did not export does not say whether texts came in pairs.
        raw = opened.meta.get("hf", {})
        is_untold = opened.config.objective in OBJECTIVES and raw and COLUMN not in raw
        columns = ",".join(PAIR) if is_untold else ""
        self.model = predict_rows.open_finetuned(
            path, dtype, flag=flag, columns=columns, opened=opened
        )
        if self.model.config.objective not in OBJECTIVES:
            raise UserError(
                f"{flag}={path} is of objective={self.model.config.objective}, and no "
                "cross-encoder: configs/finetune/rerank.py makes them"
            )
        if len(self.model.form.columns) < 2:
            raise UserError(
                f"{flag}={path} scores one text, and a cross-encoder two that are read "
                "together"
            )

    def score(
        self,
        queries: Sequence[str],
        passages: Sequence[str],
        pairs: np.ndarray,
        batch_size: int = 32,
    ) -> np.ndarray:
        """Score pairs i64 [n, 2], each the indices of a query and a passage: f32 [n].

        The score is the logit of the head. Only texts that occur in pairs are read.
        """
        texts = []
        for numbers, of in zip(pairs.T, (queries, passages), strict=True):
            used, which = np.unique(numbers, return_inverse=True)
            ids = self.model.tokenizer.encode_batch([of[i] for i in used])
            texts.append(Ragged.of([ids[i] for i in which]))
        form = self.model.form._replace(columns=PAIR)
        first, second = (text.counts(self.model.tokenizer) for text in texts)
        counts = first + second
        rows = Texts(form, counts, tuple(texts)).plan(self.model.config.data.length)
        outputs = predict_rows.predict(self.model, rows, batch_size)
        return np.array(outputs["scores"], np.float32).reshape(-1)


def rerank(found: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Reorder the passages that a search found, i64 [q, k], by scores f32 [q, depth].

    The scores are for the first `depth` passages; the others keep their order after
    these.

    >>> rerank(np.array([[5, 3, 8]]), np.array([[0.1, 0.7]])).tolist()
    [[3, 5, 8]]
    """
    depth = scores.shape[1]
    order = np.argsort(-scores, axis=1, kind="stable")
    first = np.take_along_axis(found[:, :depth], order, axis=1)
    return np.concatenate([first, found[:, depth:]], axis=1)
