# SPDX-License-Identifier: Apache-2.0
"""Weights of pieces by how hard they are to guess: adaptive masking.

Edman and Fraser 2025 (arXiv 2510.20475, section 2 and the authors' train_mask.py)
choose a piece more often, the more often it is guessed wrong: its weight is
1 - accuracy of the model in training, renewed every 200 updates. Batches of this
project depend on (config, seed, step) alone and never on the model. Therefore the
weights here are a file, which bertjax.evaluate --mask_weights writes from a trained
model and which does not change during a run. There is a second difference: they draw
each token independently; here a row predicts as many tokens as without weights, drawn
without replacement.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from bertjax import UserError
from bertjax.data.tokenizers.vocab_files import read_text

FORMAT = 1
LEAST = 1 / 30  # weight of a piece that is always right; 0.005 / 0.15 in train_mask.py


def weigh(guesses: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the weight of each piece, f64 [V] from LEAST to 1: the share of its
    guesses that were wrong.

    guesses, right: f64 [V], how often each piece was predicted, and how often rightly.
    One guess with the mean accuracy of all pieces is added to each piece, so that a
    piece with few guesses is not taken for hard or easy (train_mask.py adds one with
    accuracy 1/2). Raises UserError if nothing was predicted.

    >>> weigh(np.array([0, 9, 1, 10.0]), np.array([0, 9, 0, 6.0])).round(3)
    array([0.25 , 0.033, 0.625, 0.386])
    """
    if not guesses.sum():
        raise UserError("--mask_weights: nothing was predicted")
    accuracy = (right + right.sum() / guesses.sum()) / (guesses + 1)
    return np.maximum(1 - accuracy, LEAST)


def format_weights(weights: np.ndarray, tokenizer: Any) -> str:
    """Return the text of a weights file for weights f64 [V]: JSON, one piece and its
    weight per line, in the order of the ids."""
    pairs = zip(tokenizer.pieces, weights.round(4).tolist(), strict=True)
    lines = ",\n".join(json.dumps(pair, ensure_ascii=False) for pair in pairs)
    head = f'"format": {FORMAT}, "tokenizer": "{tokenizer.identity}"'
    return f'{{{head}, "weights": [\n{lines}\n]}}\n'


def read_mask_weights(path: str | os.PathLike[str], tokenizer: Any) -> np.ndarray:
    """Read data.mask_weights: f64 [V], above 0.

    Raises UserError if the file is missing, is not one that `format_weights` creates,
    or belongs to another tokenizer.
    """
    where = f"data.mask_weights={os.fspath(path)}"
    try:
        table = json.loads(read_text(Path(path), where))
        version, identity = table["format"], table["tokenizer"]
        weights = np.array([weight for _, weight in table["weights"]], np.float64)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(
            f"{where} is not a file of weights, which bertjax.evaluate --what=mlm "
            "--mask_weights=FILE writes"
        ) from None
    if version != FORMAT:
        raise UserError(f"{where} has format {version}: this version reads {FORMAT}")
    if identity != tokenizer.identity or len(weights) != tokenizer.vocab_size:
        raise UserError(
            f"{where} is of another tokenizer than the run's: make it from a model of "
            "this one"
        )
    if not (np.isfinite(weights) & (weights > 0)).all():
        raise UserError(f"{where}: each weight must be a number above 0")
    return weights
